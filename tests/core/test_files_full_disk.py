"""A disk that is full while results are written: a named error, and everything that had finished."""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ppl_bnn.core.errors import BNNError
from ppl_bnn.evaluation.comparison import folder
from ppl_bnn.evaluation.comparison.comparison import Comparison
from ppl_bnn.evaluation.comparison.folder import ComparisonNotWrittenError
from ppl_bnn.evaluation.comparison.run import compare
from tests.reporting.test_page import Mode, line


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_trees_and_arrays_that_do_not_fit_end_in_an_error_and_not_in_a_crash(tmp_path: Path) -> None:
    # In a process of its own, since HDF5 ends the process it runs in where it cannot write when a file is closed.
    script = """
        import resource, signal, sys
        from pathlib import Path
        import numpy as np
        import xarray
        from ppl_bnn.core import files

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        folder = Path(sys.argv[1])
        large = np.random.default_rng(0).normal(size=(8, 100_000))
        tree = xarray.DataTree.from_dict({"posterior": xarray.Dataset({"w": (("draw", "column"), large)})})
        for write, value in ((files.write_tree, tree), (files.write_arrays, {"w": large})):
            try:
                files.write_whole(folder / "file", lambda path: write(path, value))
            except OSError as error:
                print("refused:", error)
        print("left:", list(folder.iterdir()))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("refused: ") == 2
    assert ended.stdout.count("File too large") == 2
    assert "left: []" in ended.stdout


@pytest.mark.parametrize("at", ["write_tree", "write_arrays", "write_figure"])
def test_what_is_finished_is_kept_where_the_disk_is_full(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 1))
    y = x[:, 0] + 0.1 * rng.normal(size=20)
    writes = getattr(folder, at)

    def full(path: Any, *rest: Any) -> None:
        if at == "write_figure" or "second" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        writes(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(folder, at, full)
        with pytest.raises(ComparisonNotWrittenError, match="No space left on device") as raised:
            compare(
                line,
                (x[:15], y[:15]),
                (x[15:], y[15:]),
                {"first": Mode(ppl="pyro"), "second": Mode(ppl="pyro")},
                device="cpu",
                out=tmp_path / "full",
            )
    assert isinstance(raised.value, BNNError)
    assert "(first, second)" in str(raised.value)
    partial = raised.value.partial
    assert list(partial.posteriors) == ["first", "second"]
    kept = Comparison.load(tmp_path / "full")
    assert list(kept.table.index) == (["first", "second"] if at == "write_figure" else ["first"])
    partial.save(tmp_path / "elsewhere")
    assert list(Comparison.load(tmp_path / "elsewhere").table.index) == ["first", "second"]
