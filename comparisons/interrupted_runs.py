"""Twenty kills at random moments: a run that goes on each time ends in the bits of one that nobody disturbed.

A process fits the zoo's regression network by NUTS with `checkpoint=` and is killed (SIGKILL) a random time after its
chains have begun to move; the next process goes on in the same folder, and is killed too. Where the last one has
finished, every draw and statistic is compared with those of a run without a checkpoint. After each kill, what the
process had told its progress is compared with what is on disk: what lies between is lost, and is at most what was
drawn since the last writing. A process that was killed before it had told of as much as it began with tells nothing of
what it lost, and is counted apart. A process that has kept so much that the kills to come would have nothing left to
interrupt keeps no more and waits for its own, so that a busy machine, where a kill comes late, has as many of them.

    python comparisons/interrupted_runs.py [--tiny] [--kills N] [--out DIR]
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, read_claims
from study import Study, command_line

# What a process runs: seconds between two writings, the folder, and the size of the run are its arguments.
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[3])
import interrupted_runs
interrupted_runs.disturbed(sys.argv[1], interrupted_runs.Sizes(**json.loads(sys.argv[2])), int(sys.argv[4]))
"""
CHAINS = 2


@dataclass(frozen=True)
class Sizes:
    """interval: seconds between two writings. longest: seconds that a process may run once its chains move.
    reserve: transitions, of all chains together, that are left for each process to come.
    """

    kills: int = 20
    width: int = 10
    warmup: int = 300
    draws: int = 3000
    interval: float = 0.5
    longest: float = 2.0
    reserve: int = 150
    seed: int = 0

    @property
    def total(self) -> int:
        return CHAINS * (self.warmup + self.draws)


FULL = Sizes()
TINY = Sizes(kills=1, width=2, warmup=50, draws=600, interval=0.1, longest=0.3)


def fitted(sizes: Sizes, checkpoint: Path | None = None, progress: Any = None) -> Any:
    """The run itself."""
    import ppl_bnn as bnn

    model = bnn.zoo.load("regression_mlp", width=sizes.width)
    data = bnn.data.load("diabetes")
    method = bnn.NUTS(
        draws=sizes.draws, warmup=sizes.warmup, chains=CHAINS, max_tree_depth=6, checkpoint=checkpoint
    )
    return bnn.fit(
        model, data.x, data.y, method, seed=sizes.seed, device="cpu", standardise=True, progress=progress
    )


class _Told:
    """A progress that writes down how many transitions it was told of."""

    def __init__(self, path: Path):
        self.path = path

    def task(self, title: str, total: int) -> _Told:
        return self

    def update(self, done: int, **figures: float) -> None:
        # Never seen half-written, whenever the kill comes.
        partial = self.path.with_suffix(".part")
        partial.write_text(str(done))
        partial.replace(self.path)

    def close(self) -> None:
        pass


def disturbed(folder: str, sizes: Sizes, most: int) -> None:
    """What a process that will be killed does; the one that is not leaves `done.npz`. most: transitions on disk."""
    from ppl_bnn.inference.sampling import stream

    stream.INTERVAL = sizes.interval
    write, kept, one = stream.Stream.write, transitions_on_disk(Path(folder)), threading.Lock()

    def write_or_wait(self: Any, first: int, draws: Any, state: Any) -> None:
        with one:
            kept[self.name] = int(state["done_steps"][0])
            enough = sum(kept.values()) > most
        if enough:
            threading.Event().wait()
        write(self, first, draws, state)

    stream.Stream.write = write_or_wait
    posterior = fitted(sizes, Path(folder) / "run", _Told(Path(folder) / "told"))
    partial = Path(folder) / "part.npz"
    np.savez(partial, **contents(posterior))
    partial.rename(Path(folder) / "done.npz")


def contents(posterior: Any) -> dict[str, np.ndarray]:
    """Everything that a run leaves, by name."""
    u = {f"u:{name}": value for name, value in posterior.unconstrained_draws.items()}
    return u | {f"statistic:{name}": value for name, value in posterior.statistics.items()}


def transitions_on_disk(folder: Path) -> dict[str, int]:
    """How many transitions the state of each chain stands for."""
    from safetensors.numpy import load_file

    return {
        path.stem: int(load_file(path)["done_steps"][0]) for path in folder.glob("run/chain-?.safetensors")
    }


def lost(before: int, told: int, kept: int) -> int | str:
    """Transitions that a process had told of and that are not on disk; "" where it was killed before it had told of as
    many as it began with, so that this says nothing. before: on disk when it began.
    """
    # What is written is told a moment later, so that more may be on disk than was told of.
    return "" if told < before else max(0, told - kept)


def judge(study: Study) -> list[Verdict]:
    """Every bit is that of the run without a kill, after as many kills as were wanted."""
    rows, numbers = study.tables["kills"], study.numbers
    counted = [row["lost"] for row in rows if "lost" in row]
    most = f"at most {max(counted)} transitions drawn again after a kill, " if counted else ""
    text = (
        f"{len(rows)} kills of {study.sizes.kills} wanted, {numbers['transitions']} transitions; {most}from "
        f"{len(counted)} kills that tell it: {len(rows) - len(counted)} came before the process had reported as much "
        "as it began with"
    )
    referee = Referee(read_claims("interrupted_runs"))
    if len(rows) < study.sizes.kills:
        referee.not_run("same-bits", "fewer kills than wanted", text)
    else:
        share = numbers.get("equal_arrays", float(numbers["same_bits"]))
        referee.measured("same-bits", exact(share), text)
    return referee.verdicts()


def main(tiny: bool = False, out: str | Path | None = None, kills: int | None = None) -> Study:
    sizes = TINY if tiny else FULL
    if kills is not None:
        sizes = replace(sizes, kills=kills)
    study = Study.begin(sizes, "interrupted_runs", tiny, out)
    clock = time.perf_counter()
    truth = contents(fitted(sizes))
    study.say(f"undisturbed: {time.perf_counter() - clock:.1f} s, compilation included")
    rng = random.Random(sizes.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as name:
        folder = Path(name)
        while True:
            left = sizes.kills - len(rows)
            before = sum(transitions_on_disk(folder).values())
            (folder / "told").unlink(missing_ok=True)
            most = sizes.total - left * sizes.reserve
            arguments = [name, json.dumps(asdict(sizes)), str(Path(__file__).parent), str(most)]
            child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments])
            try:
                if not left:
                    if child.wait() != 0:
                        raise RuntimeError(f"the last process ended with {child.returncode}")
                    break
                while child.poll() is None and not (folder / "told").exists():
                    time.sleep(0.005)
                seconds = rng.uniform(0.0, sizes.longest)
                time.sleep(seconds)
                if child.poll() is not None:
                    raise RuntimeError(f"a process ended before its kill, with {child.returncode}")
            finally:
                child.send_signal(signal.SIGKILL)
                child.wait()
            told = int((folder / "told").read_text())
            kept = sum(transitions_on_disk(folder).values())
            rows.append(
                {
                    "kill": len(rows) + 1,
                    "seconds": seconds,
                    "at_start": before,
                    "told": told,
                    "kept": kept,
                    "lost": lost(before, told, kept),
                }
            )
            study.say(f"kill {len(rows)}: {told} transitions told of, {kept} on disk")
        with np.load(folder / "done.npz") as file:
            found = {name: file[name] for name in file.files}
    equal = [name in found and np.array_equal(found[name], value) for name, value in truth.items()]
    same = set(found) == set(truth) and all(equal)
    study.tables["kills"] = rows
    counted = [row["lost"] for row in rows if row["lost"] != ""]
    study.numbers |= {
        "kills": len(rows),
        "same_bits": same,
        "equal_arrays": sum(equal) / max(len(equal), len(found)),
        "most_lost": max(counted, default=0),
        "kills_that_tell_what_was_lost": len(counted),
        "transitions": sizes.total,
    }
    study.conclude(judge)
    return study


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, help="how many")
    main(**vars(parser.parse_args()))
