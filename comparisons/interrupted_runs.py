"""Twenty kills at random moments: a run that goes on each time ends in the bits of one that nobody disturbed.

A process fits the zoo's regression network by NUTS with `checkpoint=` and is killed (SIGKILL) a random time after its
chains have begun to move; the next process goes on in the same folder, and is killed too. Where the last one has
finished, every draw and statistic is compared with those of a run without a checkpoint. After each kill, what the
process had told its progress is compared with what is on disk: what lies between is lost, and is at most what was drawn
since the last writing.

    python comparisons/interrupted_runs.py [--tiny] [--kills N] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from study import NOT_REPRODUCED, REPRODUCED, Study, Verdict

# What a process runs: seconds between two writings, the folder, and the size of the run are its arguments.
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[3])
import interrupted_runs
interrupted_runs.disturbed(sys.argv[1], interrupted_runs.Sizes(**json.loads(sys.argv[2])))
"""


@dataclass(frozen=True)
class Sizes:
    """interval: seconds between two writings. longest: seconds that a process may run once its chains move."""

    kills: int = 20
    width: int = 10
    warmup: int = 300
    draws: int = 3000
    interval: float = 0.5
    longest: float = 2.0
    seed: int = 0


TINY = Sizes(kills=1, width=2, warmup=50, draws=600, interval=0.1, longest=0.3)


def fitted(sizes: Sizes, checkpoint: Path | None = None, progress: Any = None) -> Any:
    """The run itself."""
    import ppl_bnn as bnn

    model = bnn.zoo.load("regression_mlp", width=sizes.width)
    data = bnn.data.load("diabetes")
    method = bnn.NUTS(
        draws=sizes.draws, warmup=sizes.warmup, chains=2, max_tree_depth=6, checkpoint=checkpoint
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
        self.path.write_text(str(done))

    def close(self) -> None:
        pass


def disturbed(folder: str, sizes: Sizes) -> None:
    """What a process that will be killed does; the one that is not leaves `done.npz`."""
    from ppl_bnn.inference import stream

    stream.INTERVAL = sizes.interval
    posterior = fitted(sizes, Path(folder) / "run", _Told(Path(folder) / "told"))
    partial = Path(folder) / "part.npz"
    np.savez(partial, **contents(posterior))
    partial.rename(Path(folder) / "done.npz")


def contents(posterior: Any) -> dict[str, np.ndarray]:
    """Everything that a run leaves, by name."""
    u = {f"u:{name}": value for name, value in posterior.unconstrained_draws.items()}
    return u | {f"statistic:{name}": value for name, value in posterior.statistics.items()}


def transitions_on_disk(folder: Path) -> int:
    """How many transitions the states of all chains stand for."""
    from safetensors.numpy import load_file

    return sum(int(load_file(path)["done_steps"][0]) for path in folder.glob("run/chain-?.safetensors"))


def main(tiny: bool = False, out: str | Path | None = None, kills: int | None = None) -> Study:
    sizes = TINY if tiny else Sizes()
    if kills is not None:
        sizes = Sizes(**{**sizes.__dict__, "kills": kills})
    study = Study.begin(sizes, "interrupted_runs", tiny, out)
    clock = time.perf_counter()
    truth = contents(fitted(sizes))
    study.say(f"undisturbed: {time.perf_counter() - clock:.1f} s, compilation included")
    rng = random.Random(sizes.seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ppl-bnn-") as name:
        folder = Path(name)
        arguments = [name, json.dumps(sizes.__dict__), str(Path(__file__).parent)]
        while not (folder / "done.npz").exists():
            last = len(rows) >= sizes.kills
            before = transitions_on_disk(folder)
            (folder / "told").unlink(missing_ok=True)
            child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments])
            try:
                if last:
                    if child.wait() != 0:
                        raise RuntimeError(f"the last process ended with {child.returncode}")
                    break
                while child.poll() is None and not (folder / "told").exists():
                    time.sleep(0.005)
                seconds = rng.uniform(0.0, sizes.longest)
                time.sleep(seconds)
            finally:
                child.send_signal(signal.SIGKILL)
                child.wait()
            if (folder / "done.npz").exists():
                break
            told = int((folder / "told").read_text() or 0)
            kept = transitions_on_disk(folder)
            rows.append(
                {
                    "kill": len(rows) + 1,
                    "seconds": seconds,
                    "at_start": before,
                    "told": told,
                    "kept": kept,
                    # What is written is told a moment later.
                    "lost": max(0, told - kept),
                }
            )
            study.say(f"kill {len(rows)}: {told} transitions told of, {kept} on disk")
        with np.load(folder / "done.npz") as file:
            found = {name: file[name] for name in file.files}
    same = set(found) == set(truth) and all(
        np.array_equal(found[name], value) for name, value in truth.items()
    )
    study.tables["kills"] = rows
    total = 2 * (sizes.warmup + sizes.draws)
    lost = max((row["lost"] for row in rows), default=0)
    study.numbers |= {"kills": len(rows), "same_bits": same, "most_lost": lost, "transitions": total}
    study.judge(
        Verdict(
            "a run that is killed and goes on ends in the same bits",
            REPRODUCED if same and len(rows) >= sizes.kills else NOT_REPRODUCED,
            f"{len(rows)} kills of {sizes.kills} wanted, {total} transitions, all {len(truth)} arrays "
            f"{'equal' if same else 'NOT equal'}; at most {lost} transitions drawn again after a kill",
        )
    )
    study.write()
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--out")
    given = parser.parse_args()
    main(given.tiny, given.out, given.kills)
