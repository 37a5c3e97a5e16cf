"""The command line: `ppl-bnn compare`, `report`, `advise`, `bench`; for information `models`, `show`, `prior`, `data`.

Arguments are checked before data are read, and data before a framework is imported, so that a typing error is reported
within a fraction of a second. Exit codes: 0 all methods finished; 1 a method failed (its row gives the reason); 2
invalid input; 130 interrupted (143 by SIGTERM).
"""


def main() -> None:
    """The entry point of `ppl-bnn`."""
    from ppl_bnn.cli.commands import main as run

    run()
