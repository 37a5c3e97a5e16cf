"""The engine of all samplers: the same bits however a run is cut, interrupted, ended, resumed or made longer."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.backends.program import Program
from ppl_bnn.core.errors import BudgetError, DivergenceError, InputError, UnknownNameError, UnsupportedError
from ppl_bnn.diagnostics.function_space import convergence
from ppl_bnn.inference import registry
from ppl_bnn.inference.sampling import chains, stream
from ppl_bnn.inference.sampling.chains import Kernel
from ppl_bnn.inference.sampling.sampler import Sampler, Target, extend
from ppl_bnn.inference.sampling.stopping import Rule, Watch
from tests.problems import Conjugate

PROBLEM = Conjugate.make(rows=20, features=2)
P = 3


@dataclass(frozen=True)
class Walk(Sampler):
    """Metropolis' random walk, the shortest kernel that there is. scale: of a proposal; 0 never moves."""

    draws: int = 60
    warmup: int = 20
    chains: int = 2
    scale: float = 0.2
    together: bool = False

    def kernel(self, target: Target) -> Kernel:
        import jax
        import jax.numpy as jnp

        def begin(flat: Any, key: Any, data: Any) -> Any:
            return {"u": flat, "lp": target.log_density(flat, data), "key": key, "accepted": jnp.zeros(())}

        def step(state: Any, data: Any) -> Any:
            key, direction, coin = jax.random.split(state["key"], 3)
            proposed = state["u"] + self.scale * jax.random.normal(direction, state["u"].shape)
            density = target.log_density(proposed, data)
            accept = jnp.log(jax.random.uniform(coin)) < density - state["lp"]
            return {
                "u": jnp.where(accept, proposed, state["u"]),
                "lp": jnp.where(accept, density, state["lp"]),
                "key": key,
                "accepted": accept.astype(float),
            }

        def record(state: Any) -> Any:
            return {
                "u": state["u"],
                "lp": state["lp"],
                "acceptance_rate": state["accepted"],
                "n_steps": jnp.ones((), int),
            }

        def usable(state: Any) -> Any:
            return jnp.isfinite(state["lp"])

        if not self.together:
            return Kernel(begin, step, record, usable)

        def begin_all(flat: Any, key: Any, data: Any) -> Any:
            keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(len(flat)))
            return jax.vmap(begin, in_axes=(0, 0, None))(flat, keys, data)

        return Kernel(
            begin_all, jax.vmap(step, in_axes=(0, None)), jax.vmap(record), jax.vmap(usable), pooled=True
        )


def fit(method: Sampler, seed: int = 3, model: Any = PROBLEM.model, **keywords: Any) -> Any:
    return method.fit(model, PROBLEM.x, PROBLEM.y, seed=seed, device="cpu", **keywords)


@functools.cache
def undisturbed(draws: int = 60) -> Any:
    return fit(Walk(draws=draws))


def same(first: Any, second: Any, draws: int | None = None) -> bool:
    """Whether all draws and statistics are the same bits, up to a number of draws."""
    pairs = [(first.draws[name], second.draws[name]) for name in first.draws]
    pairs += [(first.statistics[name], second.statistics[name]) for name in first.statistics]
    return all(np.array_equal(a[:, :draws], b[:, :draws]) for a, b in pairs)


class Interrupt:
    """A progress on which someone presses Ctrl-C after so many transitions."""

    def __init__(self, after: int):
        self.after, self.done = after, 0

    def task(self, title: str, total: int) -> Interrupt:
        return self

    def update(self, done: int, **figures: float) -> None:
        self.done = done
        if done >= self.after:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass


# --- one result, however it is cut ----------------------------------------------------------------


@pytest.mark.parametrize("chain_method", ["threads", "sequential", "devices"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_and_threads_change_no_bit(chain_method, chunk, monkeypatch):
    monkeypatch.setattr(chains, "CHUNK", chunk)
    assert same(fit(Walk(chain_method=chain_method)), undisturbed())


def test_a_budget_changes_no_bit_of_what_it_leaves():
    assert same(fit(Walk(budget=1e4)), undisturbed())


def test_vectorised_chains_have_the_keys_of_the_others():
    found = fit(Walk(chain_method="vectorised"))
    # Batched arithmetic rounds otherwise, so that a decision may turn in the end, and does not at the beginning.
    for name, value in undisturbed().draws.items():
        assert np.allclose(found.draws[name][:, :5], value[:, :5], rtol=1e-9)


def test_chains_that_adapt_together_come_out_by_chain():
    found = fit(Walk(together=True, chains=3))
    assert found.shape == (3, 60)
    density = found.log_joint().reshape(3, 60)
    assert np.allclose(found.statistics["lp"], density, rtol=1e-9)
    assert not np.array_equal(found.draws["output.weight"][0], found.draws["output.weight"][1])


def test_chains_have_seeds_of_their_own_whatever_their_number():
    assert same(undisturbed(), fit(Walk(chains=3)), None) is False
    more = fit(Walk(chains=3))
    assert np.array_equal(more.draws["output.weight"][:2], undisturbed().draws["output.weight"])


def test_gradients_are_counted_warm_up_and_starts_included():
    # One for each transition of two chains, and one for each of the two starts.
    assert undisturbed().info.gradient_evaluations == 2 * (20 + 60) + 2


def test_compiled_functions_are_kept_with_the_program(monkeypatch):
    calls = []
    functions = chains.Engine._functions
    monkeypatch.setattr(chains.Engine, "_functions", lambda self: calls.append(1) or functions(self))
    posterior = fit(Walk())
    method = Walk(draws=30)

    def run(problem: Any) -> Any:
        from ppl_bnn.core.progress import Silent

        return method.run(problem, Silent())

    outcome = posterior.with_problem(run)
    assert len(calls) == 1
    assert np.array_equal(
        outcome.approximation.u["output.bias"], posterior.unconstrained_draws["output.bias"][:, :30]
    )


# --- interrupted, resumed, longer -----------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 25, 60, 110])
@pytest.mark.parametrize("chain_method", ["threads", "sequential"])
def test_an_interrupted_run_goes_on_to_the_same_bits(after, chain_method, tmp_path, monkeypatch):
    monkeypatch.setattr(chains, "CHUNK", 5)
    method = Walk(checkpoint=tmp_path / "run", chain_method=chain_method)
    with pytest.raises(KeyboardInterrupt):
        fit(method, progress=Interrupt(after))
    assert same(fit(method), undisturbed())


def test_pooled_chains_go_on_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(chains, "CHUNK", 5)
    method = Walk(checkpoint=tmp_path / "run", together=True)
    with pytest.raises(KeyboardInterrupt):
        fit(method, progress=Interrupt(70))
    assert same(fit(method), fit(Walk(together=True)))


def test_a_finished_run_with_more_draws_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(chains, "CHUNK", 8)
    fit(Walk(checkpoint=tmp_path, draws=25))
    steps = []
    advance = chains.Engine._advance
    monkeypatch.setattr(
        chains.Engine, "_advance", lambda self, *a: (steps.append(a[0].done), advance(self, *a))[1]
    )
    longer = fit(Walk(checkpoint=tmp_path))
    assert steps == [45, 45], "each chain goes on after its warm-up and 25 draws"
    assert same(longer, undisturbed())
    shorter = fit(Walk(checkpoint=tmp_path, draws=10))
    assert same(shorter, undisturbed(), 10)
    assert shorter.shape == (2, 10)


def test_nothing_is_compiled_for_beginnings_where_no_chain_begins(tmp_path, monkeypatch):
    import jax

    from ppl_bnn.backends import numpyro

    fit(Walk(checkpoint=tmp_path, draws=25))
    # As in a new process, which shares no programs with this fit.
    monkeypatch.setattr(numpyro, "_COMPILED", {})
    compiled, compile_ = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self, *a, **k: compiled.append(1) or compile_(self, *a, **k)
    )
    longer = fit(Walk(checkpoint=tmp_path))
    assert len(compiled) == 1, "the function that takes chains further"
    assert same(longer, undisturbed())


def test_a_piece_beyond_the_state_is_drawn_again(tmp_path, monkeypatch):
    """A kill between the writing of draws and that of the state after them."""
    monkeypatch.setattr(chains, "CHUNK", 5)
    method = Walk(checkpoint=tmp_path, chain_method="sequential")
    with pytest.raises(KeyboardInterrupt):
        fit(method, progress=Interrupt(40))
    before = (tmp_path / "chain-0.safetensors").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        fit(method, progress=Interrupt(60))
    (tmp_path / "chain-0.safetensors").write_bytes(before)
    assert same(fit(method), undisturbed())


def test_a_missing_piece_is_named(tmp_path):
    fit(Walk(checkpoint=tmp_path))
    next(tmp_path.glob("chain-1-draws-*")).unlink()
    with pytest.raises(InputError, match="all pieces of its draws"):
        fit(Walk(checkpoint=tmp_path))


@pytest.mark.parametrize(
    ("changed", "word"), [({"seed": 4}, "seed"), ({"model": None}, "model"), ({"scale": 0.3}, "scale")]
)
def test_the_run_of_another_fit_is_refused(changed, word, tmp_path):
    fit(Walk(checkpoint=tmp_path))

    def narrower(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 0.5))
        bnn.observe(y, f, bnn.likelihoods.Gaussian(PROBLEM.noise))

    method = Walk(checkpoint=tmp_path, scale=changed.get("scale", 0.2))
    model = narrower if "model" in changed else PROBLEM.model
    with pytest.raises(InputError, match=f"differs in .*{word}"):
        fit(method, seed=changed.get("seed", 3), model=model)


def test_draws_are_written_while_a_chain_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "INTERVAL", 0.0)
    monkeypatch.setattr(chains, "CHUNK", 10)
    fit(Walk(checkpoint=tmp_path))
    pieces = sorted(path.name for path in tmp_path.glob("chain-0-draws-*"))
    assert len(pieces) > 2
    assert pieces[0] == "chain-0-draws-00000000.safetensors"


def test_extended_chains_are_those_of_a_longer_run():
    short = fit(Walk(draws=25))
    assert same(extend(short, 35), undisturbed())


@pytest.fixture(autouse=True)
def _known_by_name(monkeypatch):
    monkeypatch.setitem(registry.MODULES, "Walk", __name__)


def test_extension_counts_what_both_runs_cost():
    short = fit(Walk(draws=25))
    longer = extend(short, 35)
    assert longer.info.settings["draws"] == 60
    assert longer.info.gradient_evaluations == short.info.gradient_evaluations + 2 * 35
    assert longer.info.run_seconds > short.info.run_seconds


def test_what_cannot_be_extended_is_refused():
    with pytest.raises(UnsupportedError, match="one sampler"):
        extend(bnn.MAP(steps=50).fit(PROBLEM.model, PROBLEM.x, PROBLEM.y), 5)
    with pytest.raises(InputError, match="draws"):
        extend(undisturbed(), 0)


def test_a_saved_posterior_is_extended_to_the_same_bits(tmp_path):
    short = fit(Walk(draws=25))
    short.save(tmp_path / "saved")
    assert same(extend(bnn.load(tmp_path / "saved", PROBLEM.model), 35), undisturbed())


def test_members_that_run_together_are_those_that_run_alone():
    found = fit(bnn.Ensemble(Walk(), size=3))
    alone = fit(bnn.Ensemble(Walk(budget=1e4), size=3))
    assert found.shape == (6, 60)
    assert found.approximation.groups == 3
    assert same(found, alone)
    first = undisturbed()
    assert np.array_equal(found.draws["output.weight"][:2], first.draws["output.weight"])
    assert found.info.gradient_evaluations == alone.info.gradient_evaluations


def test_members_start_from_modes_of_their_own():
    method = Walk(start=bnn.MAP(steps=50), draws=5, warmup=1, scale=1e-9, jitter=0.0)
    found = fit(bnn.Ensemble(method, size=2))
    assert np.allclose(found.draws["output.weight"].reshape(-1, 2), PROBLEM.mean[:2], atol=1e-6)


@pytest.mark.slow
def test_members_of_another_type_start_where_each_would_start_alone():
    """A mode is looked for in the type of its method, whether for all chains at once or for each."""
    method = Walk(start=bnn.MAP(steps=50), draws=3, warmup=1, scale=1e-9, jitter=0.0, dtype="float32")
    found = fit(bnn.Ensemble(method, size=2))
    assert same(found, fit(bnn.Ensemble(replace(method, budget=1e4), size=2)))


# --- until a rule holds, or a budget is spent -----------------------------------------------------


def test_a_chain_goes_on_until_a_rule_holds():
    found = fit(Walk(draws=200, scale=0.5, until="rhat<1.05, ess_bulk>100", budget=300.0))
    assert found.info.figures["rule_held"] == 1.0
    assert found.info.figures["stopped_by_budget"] == 0.0
    looks = found.info.history["look_draws"]
    assert found.shape[1] == looks[-1]
    assert (np.diff(looks) == 200).all()
    # What was seen at the last look is what a diagnosis of the result sees.
    judged = convergence(found)
    assert judged.rhat == pytest.approx(found.info.history["look_rhat"][-1], rel=1e-9)
    assert judged.ess_bulk == pytest.approx(found.info.history["look_ess_bulk"][-1], rel=1e-9)
    rule = Rule.of("rhat<1.05, ess_bulk>100")
    held = [
        rule.holds({"rhat": rhat, "ess_bulk": ess})
        for rhat, ess in zip(
            found.info.history["look_rhat"], found.info.history["look_ess_bulk"], strict=True
        )
    ]
    assert held == [False] * (len(held) - 1) + [True]
    assert len(held) > 1
    assert same(found, fit(Walk(draws=int(looks[-1]), scale=0.5)))


def test_each_draw_is_predicted_once_however_often_a_rule_looks(monkeypatch):
    posterior, rule, predicted = undisturbed(), Rule.of("rhat<1.01"), Program.predictor_draws
    u, seen = posterior.unconstrained_draws, []

    def counted(program: Any, w: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.append(len(next(iter(w.values()))))
        return predicted(program, w, *arguments, **keywords)

    monkeypatch.setattr(Program, "predictor_draws", counted)

    def looks(problem: Any) -> Any:
        watch, whole = Watch(problem, rule), Watch(problem, rule)
        for draws in (20, 40, 60):
            figures = watch({name: value[:, :draws] for name, value in u.items()})[1]
        chains = Watch(problem, rule)
        chains({name: value[:1] for name, value in u.items()})
        # Another run altogether is no longer version of this one.
        other = {name: value[:1, :30] for name, value in u.items()}
        return figures, chains(u)[1], whole(u)[1], chains(other)[1]

    by_draws, by_chains, whole, _ = posterior.with_problem(looks)
    assert seen == [40, 40, 40, 60, 60, 120, 30]
    assert by_draws == pytest.approx(whole, rel=1e-9)
    assert by_chains == pytest.approx(whole, rel=1e-9)


def test_a_spent_budget_leaves_a_prefix_and_says_so(monkeypatch):
    clock = time.perf_counter
    jump = [0.0]
    monkeypatch.setattr(chains.time, "perf_counter", lambda: clock() + jump[0])

    class Late(Interrupt):
        def update(self, done: int, **figures: float) -> None:
            jump[0] = 1e6 if done >= self.after else 0.0

    found = fit(Walk(until="ess>1e9", budget=1000.0, draws=60), progress=Late(90))
    assert 1 <= found.shape[1] < 60
    assert found.info.figures == {"rule_held": 0.0, "stopped_by_budget": 1.0}
    assert any("budget of 1000 s was spent" in warning for warning in found.info.warnings)
    assert same(found, undisturbed(), found.shape[1])
    assert bnn.diagnose(found).verdict == "not converged"


def test_a_budget_that_ends_in_the_warm_up_is_an_error_and_loses_nothing(tmp_path):
    with pytest.raises(BudgetError, match="of 20 transitions of the warm-up"):
        fit(Walk(budget=1e-6, checkpoint=tmp_path))
    assert same(fit(Walk(checkpoint=tmp_path)), undisturbed())


@pytest.mark.parametrize(
    ("text", "error", "word"),
    [
        ("rhat", InputError, "figure < limit"),
        ("rhat>1.01", InputError, "rhat<limit"),
        ("ess<400", InputError, "ess>limit"),
        ("rhatt<1.01", UnknownNameError, "did you mean 'rhat'"),
        ("", InputError, "a rule in words"),
        (3, InputError, "a rule in words"),
    ],
)
def test_rules_that_cannot_be_read_are_refused(text, error, word):
    with pytest.raises(error, match=word):
        Walk(until=text, budget=1.0)


def test_a_rule_wants_a_budget():
    with pytest.raises(InputError, match="a budget beside it"):
        Walk(until="rhat<1.01")


_TWO_DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import numpy as np
import tests.inference.sampling.test_chains as t
import ppl_bnn as bnn
import jax
assert len(jax.local_devices(backend="cpu")) == 2
bnn.__dict__["Walk"] = t.Walk
found = t.fit(t.Walk(chain_method="devices"))
assert t.same(found, t.fit(t.Walk(chain_method="sequential")))
"""


@pytest.mark.slow
def test_chains_over_two_devices_have_the_bits_of_one():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TWO_DEVICES],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


# --- what is not a sample is never taken for one --------------------------------------------------


def test_a_chain_that_never_moves_is_named():
    found = fit(Walk(scale=0.0))
    assert [warning for warning in found.info.warnings if "never moved" in warning] == [
        f"chain {chain} never moved: all its 60 draws are the same" for chain in range(2)
    ]
    assert bnn.diagnose(found).verdict == "not converged"


def test_a_density_that_is_not_a_number_is_no_start():
    def wrong(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0))
        bnn.observe(y, bnn.ops.log(-bnn.ops.exp(f)), bnn.likelihoods.Gaussian(1.0))

    with pytest.raises(DivergenceError, match="a finite log joint and gradient for chain 0"):
        fit(Walk(), model=wrong)


def test_a_draw_without_a_finite_density_stops_the_run():
    @dataclass(frozen=True)
    class Falling(Walk):
        def kernel(self, target: Target) -> Kernel:
            import jax.numpy as jnp

            inner = super().kernel(target)

            def record(state: Any) -> Any:
                found = inner.record(state)
                return {**found, "lp": jnp.where(state["count"] == 30, jnp.nan, found["lp"])}

            def step(state: Any, data: Any) -> Any:
                count = state["count"] + 1
                moved = inner.step({name: value for name, value in state.items() if name != "count"}, data)
                return {**moved, "count": count}

            def begin(flat: Any, key: Any, data: Any) -> Any:
                return {**inner.begin(flat, key, data), "count": jnp.zeros((), int)}

            return Kernel(begin, step, record, inner.usable)

    with pytest.raises(DivergenceError, match="nan at draw 9 of chain 0"):
        fit(Falling(chain_method="sequential"))


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"draws": 0}, "draws"),
        ({"chains": 2.5}, "chains"),
        ({"temperature": 0.0}, "temperature"),
        ({"jitter": -1.0}, "jitter"),
        ({"budget": -3.0}, "budget"),
        ({"checkpoint": 7}, "checkpoint"),
        ({"start": "map"}, "start"),
    ],
)
def test_impossible_settings_are_refused(settings, word):
    with pytest.raises(InputError, match=word):
        Walk(**settings)


def test_an_unknown_chain_method_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'threads'"):
        Walk(chain_method="thread")


def test_a_tempered_target_is_named_and_its_density_is_the_power():
    """log p(w | D)^(1/T) up to a constant, with the volume of the coordinates not tempered (a scale shows it)."""

    def model(x: Any, y: Any = None) -> None:
        noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
        bnn.observe(y, bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0)), bnn.likelihoods.Gaussian(noise))

    found = fit(Walk(temperature=0.5, draws=20), model=model)
    assert found.info.target == "tempered: the posterior to the power 1/T with T=0.5"
    u = found.unconstrained_draws["noise"]
    # |dw/du| of noise = exp(u) is exp(u).
    joint = found.log_joint().reshape(2, 20) - u
    assert np.allclose(found.statistics["lp"], joint / 0.5 + u, rtol=1e-9)
    assert fit(Walk(draws=2)).info.target == ""
