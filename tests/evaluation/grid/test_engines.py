"""Where work is done: processes of this machine, and clusters of Dask and Ray where these are installed."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import ppl_bnn as bnn
from ppl_bnn.core.errors import DeviceError, InputError, MissingFrameworkError, UnknownNameError
from ppl_bnn.evaluation.grid import engines, workers
from ppl_bnn.evaluation.grid.engines import Engine, Lost
from ppl_bnn.evaluation.grid.grid import Grid
from ppl_bnn.evaluation.grid.result import COSTS, GridResult

ROOT = Path(__file__).resolve().parents[3]
LOCAL = Engine("local")
NAMES = ("OMP_NUM_THREADS", "NPROC", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR")


def seen(number: int, array: np.ndarray, seconds: float = 0.3) -> dict[str, Any]:
    time.sleep(seconds)
    found = {name: os.environ.get(name) for name in NAMES}
    return found | {
        "number": number,
        "process": os.getpid(),
        "sum": float(array.sum()),
        "type": type(array).__name__,
    }


def dies(number: int) -> int:
    if number == 2:
        os._exit(9)
    return number


def grows(number: int) -> int:
    if number == 1:
        kept = [np.ones(10_000_000) for _ in range(10)]
        time.sleep(60.0)
        return len(kept)
    return number


def raises(number: int) -> int:
    if number == 1:
        raise ZeroDivisionError("by zero")
    return number


def lingers(number: int) -> int:
    time.sleep(0.3 if number == 1 else 5.0)
    return raises(number)


def outcomes(function: Any, tasks: list[tuple[Any, ...]], **settings: Any) -> dict[int, Any]:
    return dict(engines.outcomes(LOCAL, function, tasks, **settings))


# --- this machine -----------------------------------------------------------------------------------------


def test_each_process_has_its_share_of_the_cores_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-31,-1,7")
    # The tests share a folder of programs; here each call makes its own.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax = SimpleNamespace(config=SimpleNamespace(jax_compilation_cache_dir=None))
    monkeypatch.setitem(sys.modules, "jax", jax)
    # What another call has left running was told something else.
    large = np.ones(300_000)
    found = outcomes(seen, [(number, large) for number in range(5)], jobs=2, device="cuda")
    assert [found[number]["number"] for number in range(5)] == list(range(5))
    assert {each["CUDA_VISIBLE_DEVICES"] for each in found.values()} == {"5", "GPU-31"}
    assert len({(each["process"], each["CUDA_VISIBLE_DEVICES"]) for each in found.values()}) == 2
    assert os.getpid() not in {each["process"] for each in found.values()}
    threads = str(max(1, engines.share(1, "cpu")[1].threads // 2))
    assert {(each["OMP_NUM_THREADS"], each["NPROC"]) for each in found.values()} == {(threads, threads)}
    # One copy of the array for all: a process has it in shared memory.
    assert {(each["sum"], each["type"]) for each in found.values()} == {(300_000.0, "memmap")}
    # One folder of programs for all, which is gone.
    (programs,) = {each["JAX_COMPILATION_CACHE_DIR"] for each in found.values()}
    assert Path(programs).is_absolute()
    assert not Path(programs).parent.exists()
    # The folder of this process, if it keeps its programs.
    jax.config.jax_compilation_cache_dir = "/of/this/process"
    found = outcomes(seen, [(0, large, 0.0)], jobs=1, device="cpu")
    assert found[0]["JAX_COMPILATION_CACHE_DIR"] == "/of/this/process"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/of/my/own")
    found = outcomes(seen, [(0, large, 0.0)], jobs=1, device="cpu")
    assert found[0]["process"] != os.getpid()
    assert found[0]["JAX_PLATFORMS"] == "cpu"
    assert found[0]["JAX_COMPILATION_CACHE_DIR"] == "/of/my/own"
    assert os.environ.get("NPROC") is None


def test_a_process_sees_its_gpu_as_the_first() -> None:
    assert [engines.device_inside(LOCAL, each) for each in ("auto", "cpu", "cuda", "cuda:1")] == [
        "auto",
        "cpu",
        "cuda",
        "cuda",
    ]
    assert engines.device_inside(Engine("dask", "host:1"), "cuda:1") == "cuda"
    assert engines.device_inside(Engine("sequential"), "cuda:1") == "cuda:1"


@pytest.mark.skipif(sys.platform == "win32", reason="processes are looked up as in POSIX")
def test_what_a_killed_call_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    names = [f"ppl-bnn-{ended.pid}-abc", f"ppl-bnn-{os.getpid()}-abc", "ppl-bnn-other", "mine"]
    for name in names:
        (tmp_path / name / "programs").mkdir(parents=True)
    assert outcomes(dies, [(0,)], jobs=1) == {0: 0}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(names[1:])


def test_a_piece_that_ends_its_process_is_lost_and_the_others_are_not() -> None:
    found = outcomes(dies, [(number,) for number in range(5)], jobs=2)
    lost = found.pop(2)
    assert isinstance(lost, Lost)
    assert "EXIT(9)" in lost.reason
    assert found == {0: 0, 1: 1, 3: 3, 4: 4}


@pytest.mark.skipif(workers.own_memory() is None, reason="the system does not say what a process holds")
def test_a_process_ends_at_its_ceiling() -> None:
    found = outcomes(grows, [(number,) for number in range(3)], jobs=1, memory=300 * 2**20)
    assert (found[0], found[2]) == (0, 2)
    assert found[1].reason.startswith("MemoryError: it needed more memory")


def test_what_is_raised_in_a_process_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"):
        outcomes(raises, [(0,), (1,)], jobs=2)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        dict(engines.outcomes(Engine("sequential"), raises, [(0,), (1,)]))


def test_one_after_the_other_in_this_process() -> None:
    found = list(engines.outcomes(Engine("sequential"), seen, [(7, np.ones(2), 0.0), (8, np.ones(3), 0.0)]))
    assert [(number, result["number"], result["sum"]) for number, result in found] == [
        (0, 7, 2.0),
        (1, 8, 3.0),
    ]
    assert {result["process"] for _, result in found} == {os.getpid()}


def test_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    monkeypatch.setattr(engines, "machine_memory", lambda: 10 * 2**30)
    monkeypatch.setattr(engines, "gpus", lambda: ())
    # Eight cores, and memory for four.
    assert engines.share() == (4, workers.Share(2, int(0.9 * 10 * 2**30 / 4), None))
    assert engines.share(16, memory=2**30) == (16, workers.Share(1, 2**30, None))
    assert engines.share(3, "cpu")[1].gpus == ()
    with pytest.raises(DeviceError, match="0 of them"):
        engines.share(None, "cuda")
    monkeypatch.setattr(engines, "gpus", lambda: ("a", "b", "c"))
    assert engines.share()[0] == 3
    assert engines.share(None, "cuda")[1].gpus == ("a", "b", "c")
    assert engines.share(6, "cuda:1")[1].gpus == ("b",)
    assert engines.share(None, "cpu")[0] == 4
    with pytest.raises(DeviceError, match="3 of them"):
        engines.share(None, "cuda:3")
    monkeypatch.setattr(engines, "machine_memory", lambda: None)
    assert engines.share(None, "cpu") == (8, workers.Share(1, None, ()))


@pytest.mark.parametrize(
    ("word", "error", "words"),
    [
        ("locl", UnknownNameError, "did you mean 'local'"),
        ("local://here", InputError, "engine='local'"),
        ("dask", InputError, "dask://HOST:PORT"),
        ("dask://host", InputError, "dask://HOST:PORT"),
        ("dask://auto", InputError, "dask://HOST:PORT"),
        ("ray://", InputError, "ray://HOST:PORT"),
    ],
)
def test_an_engine_that_cannot_be(word: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Engine.of(word)


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingFrameworkError, match=r"pip install 'ppl-bnn\[dask\]'"):
        Engine.of("dask://127.0.0.1:8786")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert str(Engine.of("ray://auto")) == "ray://auto"
    # Nobody listens at the port of discarded data.
    with pytest.raises(InputError, match="a cluster that answers"):
        engines.check(Engine.of("dask://tcp://127.0.0.1:9"))
    with pytest.raises(InputError, match="has its own"):
        engines.check(Engine.of("ray://auto"), memory=2**30)
    with pytest.raises(InputError, match="one at a time in this process"):
        engines.check(Engine("sequential"), 2)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_started_them(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from ppl_bnn.evaluation.grid import engines

            # Who started the tests in the background has told them to ignore Ctrl-C, and that is inherited.
            signal.signal(signal.SIGINT, signal.default_int_handler)

            def waits(number):
                open(os.path.join(FOLDER, str(os.getpid())), "w").close()
                time.sleep(300)

            FOLDER = os.getcwd() + "/pids"
            if __name__ == "__main__":
                os.mkdir(FOLDER)
                dict(engines.outcomes(engines.Engine("local"), waits, [(1,), (2,)], jobs=2))
            """
        )
    )
    child = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True
    )
    pids: list[int] = []
    while len(pids) < 2:
        assert child.poll() is None
        time.sleep(0.1)
        pids = [int(file.name) for file in (tmp_path / "pids").glob("*")]
    if how == signal.SIGINT:
        # As a terminal does it: to every process of the group.
        os.killpg(child.pid, how)
    else:
        child.send_signal(how)
    try:
        assert child.wait(timeout=60) != 0
    finally:
        child.kill()
        child.wait()
    for _ in range(600):
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and " Z " not in _status(pid)]
        if not alive:
            break
        time.sleep(0.1)
    assert not alive


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return " Z "


@pytest.mark.slow
def test_what_one_process_compiles_the_others_read_and_the_bits_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid(
        models=["linear_regression"],
        data=["diabetes"],
        # It starts from a mode, whose programs are kept as well.
        methods={"laplace": bnn.Laplace(steps=60)},
        splits="random:2@0.9",
        reference="laplace",
        device="cpu",
    )
    kept = tmp_path / "kept"
    kept.mkdir()
    with monkeypatch.context() as patch:
        # The folder of one use in place of that of the tests, and it stays.
        patch.delenv("JAX_COMPILATION_CACHE_DIR")
        patch.setattr(workers, "sys", SimpleNamespace(modules={}, platform=sys.platform))
        patch.setattr(workers.tempfile, "TemporaryDirectory", lambda **_: contextlib.nullcontext(str(kept)))
        shared = grid.run(tmp_path / "shared", jobs=1)
    assert len(list((kept / workers.PROGRAMS).glob("*-cache"))) > 1
    # No program takes long enough to be kept.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1e9")
    alone = grid.run(tmp_path / "alone", jobs=1)
    assert not list((tmp_path / "none").glob("*-cache"))
    columns = [name for name in alone.cells.columns if name not in COSTS]
    pd.testing.assert_frame_equal(shared.cells[columns], alone.cells[columns], check_exact=True)
    assert shared.notes == alone.notes


# --- clusters ---------------------------------------------------------------------------------------------


# A cluster serves all tests of a file: each of its processes imports torch and JAX for seconds before its first fit.
@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """Two processes of one thread each."""
    distributed = pytest.importorskip("distributed")
    # It would give up a process that is not back after 15 seconds, or that has ended again then.
    with importlib.import_module("dask").config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        )
        yield f"dask://{cluster.scheduler_address.removeprefix('tcp://')}"
        cluster.close()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def ray_head(port: int) -> Iterator[tuple[str, int]]:
    """A head of two cores, which ends with its own process: other clusters of this machine are not met, nor stopped.

    Gives its folder and the port of its server for clients.
    """
    # Sockets lie in it, whose names must be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts"),
        *("start", "--head", "--block", "--num-cpus=2"),
        "--port=0",
        f"--ray-client-server-port={port}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    # Its processes find the functions of this file by name.
    folders = [str(Path(__file__).parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "RAY_TMPDIR": folder,
        # Ray's server for clients forks while its threads call into gRPC, whose handlers of forks then abort the
        # child now and then ("Check failed: next_worker->initialized_cv"); the child needs none of them.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        # Ray gives way to all others, and the tests beside this one would leave it nothing.
        "RAY_worker_niceness": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    said = Path(folder) / "said"
    with said.open("w") as file:
        head = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        while "Ray runtime started" not in said.read_text():
            assert head.poll() is None, said.read_text()
            time.sleep(0.1)
        yield folder, port
    finally:
        head.terminate()
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, int]]:
    pytest.importorskip("ray")
    with ray_head(free_port()) as found:
        yield found


@pytest.fixture
def ray(head: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    # "auto" is the cluster that is noted in this folder.
    monkeypatch.setenv("RAY_TMPDIR", head[0])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return "ray://auto"


@pytest.fixture
def ray_client(ray: str, head: tuple[str, int]) -> str:
    """The same cluster by its address, as from another machine."""
    # The server for others is begun by the head, which does not wait for it.
    ends = time.monotonic() + 60.0
    while time.monotonic() < ends:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", head[1]), timeout=1.0).close()
            break
        time.sleep(0.2)
    return f"ray://127.0.0.1:{head[1]}"


def cluster_grid() -> Grid:
    return Grid(
        models=["linear_regression"],
        data=["diabetes"],
        methods={"map": bnn.MAP(ppl="pyro", steps=50), "laplace": bnn.Laplace(ppl="pyro", steps=50)},
        splits="random:2@0.9",
        seeds=2,
        reference="laplace",
        device="cpu",
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> GridResult:
    return cluster_grid().run(tmp_path_factory.mktemp("here"), engine="sequential")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["dask", "ray", "ray_client"])
def test_a_grid_on_a_cluster_is_the_grid_of_this_machine(
    place: str, here: GridResult, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    engine = request.getfixturevalue(place)
    there = cluster_grid().run(tmp_path / "there", engine=engine)
    assert there.missing == there.failures == 0
    processes = set(there.cells["process"])
    # Ray ends processes that have been idle for a second while there are many, and starts others.
    assert len(processes) == 2 if place == "dask" else len(processes) >= 2
    assert not processes & set(here.cells["process"])
    columns = [name for name in here.cells.columns if name not in COSTS]
    pd.testing.assert_frame_equal(there.cells[columns], here.cells[columns], rtol=1e-9)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        dict(engines.outcomes(Engine.of(engine), raises, [(0,), (1,)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["dask", "ray", "ray_client"])
def test_a_piece_that_ends_its_process_is_lost_on_a_cluster(
    place: str, request: pytest.FixtureRequest
) -> None:
    engine = Engine.of(request.getfixturevalue(place))
    found = dict(engines.outcomes(engine, dies, [(number,) for number in range(4)]))
    assert "its process ended under it" in found.pop(2).reason
    assert found == {0: 0, 1: 1, 3: 3}


def drivers() -> list[int]:
    """The processes that are connected to a cluster of Ray for this one."""
    import psutil

    found = []
    for each in psutil.Process().children():
        # One that has just ended has no command.
        with contextlib.suppress(psutil.Error):
            if any("popen_loky" in word for word in each.cmdline()):
                found.append(each.pid)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_may_end_the_process_that_is_connected_to_it(ray: str) -> None:
    pytest.importorskip("psutil")
    engine = Engine.of(ray)
    before = set(drivers())
    killed: list[int] = []
    found: dict[int, Any] = {}
    for number, result in engines.outcomes(engine, seen, [(number, np.ones(2)) for number in range(8)]):
        assert number not in found
        found[number] = result["number"]
        if number in (1, 4):
            killed += set(drivers()) - before
            os.kill(killed[-1], signal.SIGABRT)
    assert found == {number: number for number in range(8)}
    assert len(set(killed)) == 2
    assert set(drivers()) <= before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_processes_of_several_threads_are_refused() -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=True, dashboard_address=None, silence_logs=50
    ) as cluster:
        engine = Engine.of(f"dask://{cluster.scheduler_address}")
        with pytest.raises(InputError, match="with up to 2 threads in one"):
            dict(engines.outcomes(engine, raises, [(0,)]))
