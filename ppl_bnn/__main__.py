"""`python -m ppl_bnn` is the command `ppl-bnn`."""

from __future__ import annotations

from ppl_bnn.cli.commands import main

if __name__ == "__main__":
    main()
