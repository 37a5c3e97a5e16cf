"""Several threads of one process: the bits of each as if it were alone, and globals that nobody else sees change."""

from __future__ import annotations

import dataclasses
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends import turns
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import ModelError
from ppl_bnn.core.warning_filters import ignored, recorded
from ppl_bnn.inference.registry import ROWS
from tests.backends.test_program import differences, globals_now
from tests.inference.test_method import linear_model
from tests.problems import METHODS, regression_data, small_network

X, Y = regression_data(rows=25)
NEW = np.random.default_rng(5).normal(size=(7, 2))
# Nothing here takes as long; a thread that hangs fails its test.
PATIENCE = 300.0


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls give, each in a thread of its own, all begun together."""
    begin = threading.Barrier(len(calls))
    found: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            begin.wait()
            found[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return found


def result(method: Any, seed: int, model: Any = small_network) -> dict[str, np.ndarray]:
    """All that a fit and a prediction compute."""
    posterior = method.fit(model, X, Y, seed=seed, progress=False)
    prediction = posterior.predict(NEW)
    return {**posterior.draws, "mean": prediction.mean, "std": prediction.std}


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray], which: Any = "") -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, (which, name)
        assert np.array_equal(value, second[name], equal_nan=True), (which, name)


def same_as_alone(methods: Sequence[Any], model: Any = small_network) -> None:
    calls = [lambda m=method, s=seed: result(m, s, model) for seed, method in enumerate(methods)]
    alone = [call() for call in calls]
    before = globals_now()
    together = at_once(calls)
    assert differences(before) == []
    for method, one, other in zip(methods, alone, together, strict=True):
        assert_same(one, other, method)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads change at every step."""
    monkeypatch.setattr(turns, "SLICE", 0.0)


# --- the same bits ----------------------------------------------------------------------------------


QUICK = {
    "pyro": [
        lambda dtype: bnn.MAP(ppl="pyro", steps=60, dtype=dtype),
        lambda dtype: bnn.SVI(ppl="pyro", steps=60, dtype=dtype),
        lambda dtype: bnn.SVI(ppl="pyro", steps=60, dtype=dtype, guide="fullrank", batch_size=10),
        lambda dtype: bnn.NUTS(ppl="pyro", draws=15, warmup=15, chains=1, dtype=dtype),
        lambda dtype: bnn.Laplace(ppl="pyro", steps=60, dtype=dtype),
    ],
    "numpyro": [lambda dtype: bnn.SVI(ppl="numpyro", steps=30, dtype=dtype)],
}


# The slow tests have each class of methods.
@pytest.mark.parametrize(("ppl", "which"), [("pyro", 2), ("pyro", 4), ("numpyro", 0)])
def test_two_threads_of_two_precisions_give_the_bits_of_one(ppl: str, which: int, restless: None) -> None:
    build = QUICK[ppl][which]
    same_as_alone([build("float64"), build("float32")])


def test_different_methods_of_both_systems_at_once(restless: None) -> None:
    same_as_alone([build("float32") for build in QUICK["pyro"][:4]] + [QUICK["numpyro"][0]("float64")])


def test_a_model_of_pyro_has_the_type_of_its_own_session(restless: None) -> None:
    import pyro
    import pyro.distributions as dist
    import torch

    def model(x: Any, y: Any = None) -> None:
        prior: Any = dist.Normal(0.0, 1.0)
        weight = pyro.sample("weight", prior.expand([2, 1]).to_event(2))
        shift = pyro.sample("shift", dist.Normal(torch.zeros(1), torch.arange(1, 2) / 2).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x @ weight + shift).squeeze(-1), noise), obs=y)

    for engine in ("ours", "system"):
        settings: dict[str, Any] = {} if engine == "system" else {"guide": "diagonal"}
        methods = [bnn.SVI(ppl="pyro", steps=40, dtype=dtype, **settings) for dtype in ("float64", "float32")]
        same_as_alone(methods, model)
        for method in methods:
            draws = method.fit(model, X, Y, progress=False).draws
            assert {value.dtype.name for value in draws.values()} == {method.dtype}


# LAPS and MEADS draw as ChEES does, many chains in one program.
CLASSES = {ROWS[name].class_name: name for name in reversed(METHODS) if name not in ("laps", "meads")}


def in_threads(name: str, dtype: str) -> Any:
    """A quick method in Pyro, which has more global state, or in NumPyro where Pyro does not have it."""
    row = METHODS[name]
    method = row.build("pyro" if "pyro" in row.systems else "numpyro", row.quick)
    if method.ppl == "pyro" and hasattr(method, "chain_method"):
        # In these threads, not in processes of their own.
        method = dataclasses.replace(method, chain_method="sequential")
    return dataclasses.replace(method, dtype=dtype)


# Chains of Pyro, and chains that one program of JAX draws; loops of an optimiser are under the default tests.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nuts", "mclmc"])
def test_a_method_in_four_threads_gives_the_bits_of_one(name: str) -> None:
    kinds = [lambda m=in_threads(name, dtype): result(m, 0) for dtype in ("float64", "float32")]
    alone = [kind() for kind in kinds]
    before = globals_now()
    together = at_once([kinds[index % 2] for index in range(4)])
    assert differences(before) == []
    for index, found in enumerate(together):
        assert_same(alone[index % 2], found, (name, index))


@pytest.mark.slow
def test_every_method_beside_others_gives_the_bits_of_it_alone() -> None:
    """Six threads fit each class of methods once, in two precisions and both systems."""
    methods = [in_threads(name, ("float64", "float32")[at % 2]) for at, name in enumerate(CLASSES.values())]
    assert {method.ppl for method in methods} == {"pyro", "numpyro"}
    calls = [lambda m=method: result(m, 1, linear_model) for method in methods]
    alone = [call() for call in calls]
    before = globals_now()
    orders = np.array_split(np.random.default_rng(0).permutation(len(calls)), 6)
    together = at_once([lambda o=order: [(index, calls[index]()) for index in o] for order in orders])
    assert differences(before) == []
    for found in together:
        for index, one in found:
            assert_same(alone[index], one, methods[index])


# --- what other threads see -------------------------------------------------------------------------


def test_no_other_thread_sees_another_default_type() -> None:
    import torch

    seen, done = set(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add((torch.get_default_dtype(), torch.ones(1).dtype))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        bnn.SVI(ppl="pyro", steps=100, dtype="float64").fit(small_network, X, Y, progress=False).predict(NEW)
    finally:
        done.set()
        watching.join()
    assert seen == {(torch.float32, torch.float32)}


class Calling:
    """A progress that does something at its first update, and remembers what got of it."""

    def __init__(self, action: Callable[[], Any]):
        self.action, self.found = action, []

    def task(self, title: str, total: int) -> Calling:
        return self

    def update(self, done: int, **figures: float) -> None:
        if not self.found:
            self.found.append(None)
            self.found[0] = self.action()

    def close(self) -> None:
        pass


def test_a_callback_finds_the_users_globals_and_another_thread_can_fit_meanwhile(ppl: str) -> None:
    def fits() -> dict[str, np.ndarray]:
        return result(bnn.SVI(ppl=ppl, steps=30), 3)

    alone = fits()
    method = bnn.SVI(ppl=ppl, steps=200)
    plain = method.fit(small_network, X, Y, progress=False).draws
    before = globals_now()
    calling = Calling(lambda: (differences(before), at_once([fits])[0]))
    told = method.fit(small_network, X, Y, progress=calling).draws
    changed, there = calling.found[0]
    # JAX's settings belong to a thread: no other one sees them.
    assert [name for name in changed if name not in ("x64", "jax device")] == []
    assert_same(alone, there)
    assert_same(plain, told)
    assert differences(before) == []


def test_what_a_callback_changes_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyro
    import torch

    with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope():
        method = bnn.SVI(ppl="pyro", steps=200)
        plain = method.fit(small_network, X, Y, progress=False).draws
        torch.manual_seed(4)
        calling = Calling(lambda: (pyro.param("mine", torch.ones(2)), torch.rand(3)))
        assert_same(plain, method.fit(small_network, X, Y, progress=calling).draws)
        drawn = torch.cat([calling.found[0][1], torch.rand(3)])
        assert list(pyro.get_param_store().keys()) == ["mine"]
        torch.manual_seed(4)
        assert torch.equal(drawn, torch.cat([torch.rand(3), torch.rand(3)]))


def test_an_error_in_a_callback_leaves_nothing_behind(ppl: str) -> None:
    class Mine(Exception):
        pass

    def fails() -> None:
        raise Mine

    before = globals_now()
    with pytest.raises(Mine):
        bnn.SVI(ppl=ppl, steps=200).fit(small_network, X, Y, progress=Calling(fails))
    assert differences(before) == []
    assert not system(ppl).turn.held


def test_an_error_in_one_thread_is_its_own(ppl: str, restless: None) -> None:
    def broken(x: Any, y: Any = None) -> None:
        bnn.sample("noise", bnn.dist.HalfNormal(1.0))
        bnn.mlp(x, [1])

    def refused() -> str:
        for _ in range(5):
            with pytest.raises(ModelError) as found:
                bnn.MAP(ppl=ppl, steps=20).fit(broken, X, Y, progress=False)
        return str(found.value)

    call = lambda: result(bnn.SVI(ppl=ppl, steps=30), 1)
    alone, said = call(), refused()
    before = globals_now()
    together, also = at_once([call, refused])
    assert also == said
    assert_same(alone, together)
    assert differences(before) == []


def test_a_prediction_beside_a_fit_in_the_background(ppl: str) -> None:
    posterior = bnn.SVI(ppl=ppl, steps=30).fit(small_network, X, Y, progress=False)
    expected = posterior.predict(NEW).mean
    call = lambda: result(bnn.SVI(ppl=ppl, steps=100, dtype="float32"), 1)
    alone = call()
    found: list[Any] = []
    background = threading.Thread(target=lambda: found.append(call()))
    background.start()
    predictions = []
    while background.is_alive():
        predictions.append(posterior.predict(NEW).mean)
    background.join()
    assert predictions
    assert all(np.array_equal(expected, each) for each in predictions)
    assert_same(alone, found[0])


@pytest.mark.slow
def test_estimators_in_threads_of_joblib(ppl: str) -> None:
    import joblib

    from ppl_bnn.estimators import BNNRegressor

    def score(seed: int) -> np.ndarray:
        return BNNRegressor(method=bnn.MAP(ppl=ppl, steps=20), random_state=seed).fit(X, Y).predict(NEW)

    alone = [score(seed) for seed in range(2)]
    before = globals_now()
    found: Any = joblib.Parallel(n_jobs=2, backend="threading")(joblib.delayed(score)(s) for s in range(2))
    assert differences(before) == []
    assert all(np.array_equal(one, other) for one, other in zip(alone, found, strict=True))


# --- torch's default type in one thread ---------------------------------------------------------------


def test_tensors_of_a_users_code_have_the_type_of_the_block() -> None:
    import torch

    from ppl_bnn.language.modules.torch_defaults import defaults

    whole = torch.arange(1, 4)
    made: list[Callable[[], Any]] = [
        lambda: torch.zeros(2),
        lambda: torch.randn(2),
        lambda: torch.eye(2),
        lambda: torch.tensor([0.1, 0.2]),
        lambda: torch.as_tensor(0.1),
        lambda: torch.full((2,), 0.1),
        lambda: torch.arange(0.0, 1.0, 0.1),
        lambda: torch.nn.Linear(2, 1).weight,
        lambda: whole / 3,
        lambda: whole * 0.1,
        lambda: whole.sqrt(),
        lambda: torch.distributions.Normal(0.0, 0.1).scale,
        lambda: torch.distributions.Gamma(0.1, 2.0).concentration,
    ]
    said: list[tuple[Callable[[], Any], Any]] = [
        (lambda: torch.zeros(2, dtype=torch.float32), torch.float32),
        (lambda: torch.as_tensor(np.ones(2, np.float32)), torch.float32),
        (lambda: whole.float(), torch.float32),
        (lambda: torch.full((2,), 1), torch.int64),
        (lambda: torch.arange(3), torch.int64),
        (lambda: torch.tensor([True]), torch.bool),
        (lambda: whole > 2, torch.bool),
        (lambda: torch.ones(2, dtype=torch.float16) * 2, torch.float16),
    ]
    before = torch.get_rng_state()
    with torch.random.fork_rng(devices=[]), defaults()(torch.float64):
        assert [make().dtype for make in made] == [torch.float64] * len(made)
        assert [make().dtype for make, _ in said] == [dtype for _, dtype in said]
        # Computed in that type, not rounded on the way.
        np.testing.assert_array_equal((whole / 3).numpy(), np.arange(1, 4) / 3)
        assert float(torch.tensor(0.1)) == 0.1
        elsewhere = at_once([lambda: torch.zeros(1).dtype])
    assert elsewhere == [torch.float32]
    assert torch.zeros(1).dtype is torch.float32
    assert torch.equal(before, torch.get_rng_state())


# --- turns --------------------------------------------------------------------------------------------


def waiting(turn: turns.Turn, count: int) -> None:
    """Until so many threads wait."""
    for _ in range(10_000):
        if len(turn._waiting) == count:
            return
        time.sleep(0.001)
    raise AssertionError(f"{len(turn._waiting)} wait, not {count}")


def test_turns_go_by_the_order_of_asking_and_can_be_taken_again() -> None:
    turn, order, threads = turns.Turn(), [], []
    with turn, turn:
        for index in range(4):

            def work(index: int = index) -> None:
                with turn, turn:
                    order.append(index)

            threads.append(threading.Thread(target=work))
            threads[-1].start()
            waiting(turn, index + 1)
        assert turn.held
        assert order == []
        depth = turn.release_all()
        assert depth == 2
        # Those who wait come first.
        turn.acquire(depth)
        assert order == [0, 1, 2, 3]
        assert turn.held
    assert not turn.held
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("late", [False, True], ids=["while it waits", "as it is given the turn"])
def test_an_interrupt_while_waiting_passes_the_turn_on(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    turn, begun = turns.Turn(), threading.Event()
    real = turn._changed.wait

    def wait(timeout: float | None = None) -> None:
        begun.set()
        if late:
            real(timeout)
        raise KeyboardInterrupt

    caught: list[bool] = []

    def interrupted() -> None:
        try:
            turn.acquire()
        except KeyboardInterrupt:
            caught.append(turn.held)

    thread = threading.Thread(target=interrupted)
    turn.acquire()
    monkeypatch.setattr(turn._changed, "wait", wait)
    thread.start()
    assert begun.wait(PATIENCE)
    if late:
        turn.release()
    thread.join()
    if not late:
        turn.release()
    assert caught == [False]
    with turn:
        assert turn.held


def test_a_turn_is_wanted_where_someone_waits_and_the_slice_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = turns.Turn()
    now = 10.0
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now)
    with turn:
        now += 1.0
        assert not turn.wanted
        thread = threading.Thread(target=lambda: turn.acquire() or turn.release())
        thread.start()
        waiting(turn, 1)
        now = 10.0 + 0.99 * turns.SLICE
        assert not turn.wanted
        now = 10.0 + 1.01 * turns.SLICE
        assert turn.wanted
    thread.join()


# --- warnings -----------------------------------------------------------------------------------------


def test_warnings_are_ignored_in_one_thread_and_filters_are_left() -> None:
    before = list(warnings.filters)
    inside, leave = threading.Event(), threading.Event()

    def quiet() -> None:
        with ignored("mine", UserWarning):
            warnings.warn("Mine to ignore", stacklevel=1)
            inside.set()
            leave.wait()
            warnings.warn("mine again", stacklevel=1)
            with pytest.raises(UserWarning, match="other"):
                warnings.warn("other", stacklevel=1)
            with pytest.raises(RuntimeWarning):
                warnings.warn("mine of another kind", RuntimeWarning, stacklevel=1)

    def loud() -> None:
        inside.wait()
        with pytest.raises(UserWarning, match="mine"):
            warnings.warn("mine", stacklevel=1)
        with ignored("mine", UserWarning):
            # The first to enter is the first to leave.
            leave.set()

    at_once([quiet, loud])
    assert list(warnings.filters) == before


def test_filters_are_left_where_another_thread_puts_a_copy_in_their_place() -> None:
    """A copy of the list that is put in its place inside of a block, and one that is put back there."""
    before = list(warnings.filters)
    steps = [threading.Event() for _ in range(3)]

    def copying() -> None:
        with warnings.catch_warnings():
            steps[0].set()
            steps[1].wait(PATIENCE)
            with warnings.catch_warnings():
                steps[2].set()
                other.join()

    def quiet() -> None:
        steps[0].wait(PATIENCE)
        with ignored("mine"):
            steps[1].set()
            steps[2].wait(PATIENCE)
            with ignored("mine"):
                warnings.warn("mine", stacklevel=1)
            warnings.warn("mine", stacklevel=1)

    other = threading.Thread(target=quiet)
    other.start()
    at_once([copying])
    assert list(warnings.filters) == before


def test_each_thread_keeps_its_own_warnings() -> None:
    before, shown = list(warnings.filters), warnings.showwarning
    both = threading.Barrier(2)

    def keep(name: str) -> list[str]:
        with ignored("hidden"), recorded() as outer:
            for _ in range(2):
                both.wait()
                warnings.warn(f"{name} said", stacklevel=1)
                warnings.warn("hidden before the list", RuntimeWarning, stacklevel=1)
            with ignored("quiet"):
                warnings.warn("quiet now", stacklevel=1)
            with recorded() as inner:
                warnings.warn("inner", stacklevel=1)
        assert [str(each.message) for each in inner] == ["inner"]
        return [str(each.message) for each in outer]

    found = at_once([lambda: keep("one"), lambda: keep("two")])
    assert found == [[f"{name} said", "hidden before the list"] * 2 for name in ("one", "two")]
    assert list(warnings.filters) == before
    assert warnings.showwarning is shown


def test_a_warning_that_was_shown_before_is_kept_all_the_same() -> None:
    def warn() -> None:
        warnings.warn("once", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with recorded():
            pass
        with pytest.warns(UserWarning, match="once"):
            warn()
        for _ in range(2):
            with recorded() as kept:
                warn()
            assert len(kept) == 1


def test_warnings_of_all_threads_can_be_ignored() -> None:
    with ignored("mine", UserWarning, everywhere=True):
        at_once([lambda: warnings.warn("mine", stacklevel=1)])
    with pytest.raises(UserWarning):
        warnings.warn("mine", stacklevel=1)
