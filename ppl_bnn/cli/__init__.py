"""The command line: `ppl-bnn compare`, `report`, `advise`, `bench`; to look around `models`, `show`, `prior`, `data`.

Names, numbers and folders are checked before data are read, and data before a framework is imported, so that a typing
error costs a fraction of a second. Exit codes: 0 all methods finished; 1 a method failed (its row says why); 2 bad
input; 130 interrupted (143 by SIGTERM).
"""


def main() -> None:
    """The entry point of `ppl-bnn`."""
    from ppl_bnn.cli.commands import main as run

    run()
