"""Ensembles against single fits with the members' seeds, closed forms, and what becomes of members that fail."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.special import logsumexp

import ppl_bnn as bnn
from ppl_bnn import MAP, NUTS, SVI, Ensemble, Laplace, likelihoods, priors
from ppl_bnn.core.arrays import site_seed
from ppl_bnn.core.errors import DivergenceError, InputError, UnsupportedError
from ppl_bnn.inference.ensembles.members import Members, mixture
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.optimisation import mode
from ppl_bnn.inference.optimisation.several_modes import held_out
from ppl_bnn.inference.sampling.sampler import Sampler
from ppl_bnn.posterior.approximation import Chains, Point
from ppl_bnn.posterior.registered import approximation_class
from ppl_bnn.prediction.prediction import Prediction
from tests.problems import Conjugate, regression_data, small_network

X, Y = regression_data(rows=25)
NEW = np.random.default_rng(8).normal(size=(4, 2))
AT = np.array([-1.0, 0.0, 0.5, 2.0])


def seed_of(index: int, seed: int = 0) -> int:
    return seed if index == 0 else site_seed(f"member {index}", seed) % 2**31


# --- points ---------------------------------------------------------------------------------------


def test_members_coincide_where_there_is_one_mode(ppl):
    problem = Conjugate.make()
    posterior = bnn.fit(problem.model, problem.x, problem.y, Ensemble(MAP(ppl=ppl, steps=200), 3))
    assert posterior.info.ppl == ppl
    assert (posterior.kind, posterior.shape) == ("iid", (1, 3))
    assert np.allclose(Conjugate.flat(posterior.draws)[0], problem.mean, rtol=1e-6, atol=1e-8)
    assert posterior.predict(problem.x[:4]).epistemic.max() < 1e-12


def test_members_fitted_together_are_single_fits(ppl):
    """The same losses, step by step, as from a fit with the seed of the member; and their mixture as prediction."""
    settings = {"ppl": ppl, "steps": 100, "polish": False}
    posterior = bnn.fit(small_network, X, Y, Ensemble(MAP(**settings), 2))
    singles = [bnn.fit(small_network, X, Y, MAP(**settings), seed=seed_of(index)) for index in range(2)]
    losses = posterior.info.history["member_loss"]
    assert losses.shape == (100, 2)
    for index, single in enumerate(singles):
        assert np.allclose(losses[:, index], single.info.history["loss"], rtol=1e-9)
        for name, value in single.draws.items():
            assert np.allclose(posterior.draws[name][0, index], value[0, 0], rtol=1e-7, atol=1e-9), name
    assert np.ptp(losses[0]) > 0.1
    wanted = logsumexp([single.predict(NEW).log_prob(AT) for single in singles], axis=0) - np.log(2)
    assert np.allclose(posterior.predict(NEW).log_prob(AT), wanted, rtol=1e-6)
    assert posterior.info.gradient_evaluations == sum(s.info.gradient_evaluations for s in singles)
    assert posterior.info.figures == {"members": 2.0, "converged": 0.0}
    assert any("still falling" in text and text.startswith("all members") for text in posterior.info.warnings)


@pytest.mark.slow
def test_fewer_at_a_time_are_the_same_members():
    settings = {"steps": 100, "polish": False}
    whole = bnn.fit(small_network, X, Y, Ensemble(MAP(**settings), 3))
    parts = bnn.fit(small_network, X, Y, Ensemble(MAP(**settings), 3, together=2))
    for name, value in whole.draws.items():
        assert np.allclose(value, parts.draws[name], rtol=1e-7, atol=1e-9), name


def test_each_member_is_handed_out_once():
    points = [Point({"a": np.full(2, float(k)), "b": np.asarray(-float(k))}) for k in range(4)]
    members = Members(tuple(points))
    rng = np.random.default_rng(0)
    assert np.array_equal(members.draw(4, rng)["a"][:, 0], np.arange(4.0))
    assert np.array_equal(members.stored_draws()["b"], -np.arange(4.0))
    assert np.array_equal(members.draw(8, rng)["b"], -np.repeat(np.arange(4.0), 2))
    weighted = members.weighted(np.array([0.5, 0.0, 0.5, 0.0]))
    assert np.array_equal(np.unique(weighted.draw(6, rng)["b"]), [-2.0, 0.0])
    assert members.weights is None
    assert members.log_prob(members.stored_draws()) is None


def test_mini_batches_by_a_member_that_has_them():
    member = SVI(guide="delta", steps=60, batch_size=5, elbo_draws=2)
    posterior = bnn.fit(small_network, X, Y, Ensemble(member, 2))
    assert posterior.shape == (1, 2)
    assert posterior.approximation.stored_count == 2
    assert posterior.predict(NEW).draws == 2


# --- approximations and chains --------------------------------------------------------------------


def test_a_mixture_of_approximations(tmp_path):
    """Closed forms, densities, linearised draws and joint moments, each from posteriors of single members."""
    posterior = bnn.fit(small_network, X, Y, Ensemble(Laplace(steps=300), 2))
    singles = [dataclasses.replace(posterior, approximation=each) for each in posterior.approximation.members]
    assert (posterior.kind, posterior.shape) == ("iid", (1, 1000))
    assert posterior.approximation.kinds[0] == "linearised"
    found, parts = posterior.predict(NEW), [single.predict(NEW) for single in singles]
    wanted = logsumexp([part.log_prob(AT) for part in parts], axis=0) - np.log(2)
    assert np.allclose(found.log_prob(AT), wanted, rtol=1e-10)
    means = np.stack([part.mean for part in parts])
    assert np.allclose(
        found.epistemic, np.mean([p.epistemic for p in parts], axis=0) + means.var(0), rtol=1e-8
    )
    assert np.allclose(found.aleatoric, np.mean([p.aleatoric for p in parts], axis=0), rtol=1e-8)

    u = {name: value[0] for name, value in posterior.unconstrained_draws.items()}
    densities = [single.approximation.log_prob(u) for single in singles]
    assert np.allclose(posterior.log_q()[0], logsumexp(densities, axis=0) - np.log(2), rtol=1e-10)
    # Half of the draws from each; they are linearised about the mode of their own.
    owners = np.argmax(densities, axis=0)
    assert abs(owners.mean() - 0.5) < 0.02
    eta = posterior.predictor(NEW)[0]
    for index, single in enumerate(singles):
        mine = {name: value[owners == index] for name, value in u.items()}
        own = single.with_problem(
            lambda problem, s=single, m=mine: s.approximation.predictor_draws(
                problem, m, NEW, "linearised", 0, 2**28
            )
        )
        assert np.allclose(eta[owners == index], own, rtol=1e-9)

    joint, of_each = posterior.joint(NEW), [single.joint(NEW) for single in singles]
    deviations = np.stack([part.mean for part in of_each]) - joint.mean
    covariance = np.mean([part.covariance for part in of_each], 0) + deviations.T @ deviations / 2
    assert np.allclose(joint.covariance, covariance, rtol=1e-8)
    assert np.allclose(joint.mean, means.mean(0), rtol=1e-8)

    weighted = dataclasses.replace(
        posterior, approximation=posterior.approximation.weighted(np.array([0.25, 0.75]))
    )
    wanted = logsumexp([part.log_prob(AT) for part in parts], axis=0, b=np.array([[0.25], [0.75]]))
    assert np.allclose(weighted.predict(NEW).log_prob(AT), wanted, rtol=1e-10)
    owners = np.argmax(
        [s.approximation.log_prob(_flat(weighted.unconstrained_draws)) for s in singles], axis=0
    )
    assert abs(owners.mean() - 0.75) < 0.02

    posterior.save(tmp_path / "kept")
    again = bnn.load(tmp_path / "kept", small_network)
    assert np.array_equal(again.predict(NEW).log_prob(AT), found.log_prob(AT))


def _flat(u):
    return {name: value[0] for name, value in u.items()}


def test_members_with_tuned_hyperparameters_keep_their_own():
    problem = Conjugate.make(rows=15)
    method = Laplace(steps=200, noise="evidence", tune="global", ppl="pyro")
    # Drawn rows: members with the same rows would be tuned alike.
    posterior = bnn.fit(problem.model, problem.x, problem.y, Ensemble(method, 2, bootstrap=True))
    noises = [member.noise for member in posterior.approximation.members]
    assert abs(noises[0] - noises[1]) > 1e-3
    assert np.isclose(posterior.predict(problem.x[:3]).aleatoric[0], np.mean(np.square(noises)), rtol=1e-8)
    # Each approximates the posterior of a model of its own: there is no one density to be compared with.
    assert posterior.log_q() is None
    assert np.isfinite(posterior.predict(problem.x[:3], draws=10).mean).all()


def test_members_on_different_subspaces():
    """The last layer has a spread, the first is another in each member: a draw has the density of the one it is on."""
    posterior = bnn.fit(small_network, X, Y, Ensemble(Laplace(steps=200, weights="last_layer"), 2))
    first, second = posterior.approximation.members
    rng = np.random.default_rng(0)
    u = first.draw(3, rng)
    assert np.allclose(posterior.approximation.log_prob(u), first.log_prob(u) - np.log(2))
    shifted = {name: value + 1e-3 for name, value in second.draw(3, rng).items()}
    assert np.all(np.isneginf(posterior.approximation.log_prob(shifted)))


def test_chains_of_members_stand_together():
    member = NUTS(draws=6, warmup=6, chains=2, max_tree_depth=2)
    posterior = bnn.fit(small_network, X, Y, Ensemble(member, 2))
    assert isinstance(posterior.approximation, Chains)
    assert (posterior.kind, posterior.shape) == ("chains", (4, 6))
    assert posterior.approximation.groups == 2
    assert len(posterior.approximation.components) == 2
    assert posterior.statistics["diverging"].shape == (4, 6)
    for name, value in posterior.draws.items():
        assert not np.array_equal(value[:2], value[2:]), name


@pytest.mark.slow
def test_chains_of_a_member_start_from_modes_of_their_own():
    """Two transitions leave each chain nearest to the mode that a fit with its member's seed finds."""
    member = NUTS(draws=1, warmup=1, chains=1, max_tree_depth=1, start=MAP(steps=200), jitter=0.0)
    posterior = bnn.fit(small_network, X, Y, Ensemble(member, 3))
    modes = bnn.fit(small_network, X, Y, Ensemble(MAP(steps=200), 3))
    assert np.array_equal(_distances(posterior, modes).argmin(1), np.arange(3))


def _distances(*posteriors) -> np.ndarray:
    """Between draws in unconstrained coordinates, (draws, draws)."""
    flat = [
        np.concatenate(
            [value.reshape(len(value), -1) for value in each.approximation.stored_draws().values()], axis=1
        )
        for each in posteriors
    ]
    return np.linalg.norm(flat[0][:, None] - flat[1][None], axis=-1)


@pytest.mark.slow
def test_chains_start_from_members():
    """A warm-up of one transition and a draw of another leave each chain nearest to the member it began in."""
    start = bnn.fit(small_network, X, Y, Ensemble(MAP(steps=200), 3))
    sampler = NUTS(draws=1, warmup=1, chains=3, max_tree_depth=1, start=start, jitter=0.0)
    posterior = bnn.fit(small_network, X, Y, sampler)
    assert np.array_equal(_distances(posterior, start).argmin(1), np.arange(3))


def test_mixture_of_predictions_with_weights_per_row():
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(2), size=3).T
    first = Prediction("Normal", {"loc": rng.normal(size=(2, 3)), "scale": np.ones((2, 3))}, np.log(weights))
    second = Prediction(
        "Normal",
        {"loc": rng.normal(size=(1, 3)), "scale": np.full((1, 3), 2.0)},
        epistemic_within=np.full((1, 3), 1.5),
    )
    both = mixture([first, second], np.array([0.4, 0.6]))
    wanted = logsumexp([first.log_prob(AT[:3]), second.log_prob(AT[:3])], axis=0, b=[[0.4], [0.6]])
    assert np.allclose(both.log_prob(AT[:3]), wanted)
    mean = 0.4 * first.mean + 0.6 * second.mean
    between = 0.4 * (first.mean - mean) ** 2 + 0.6 * (second.mean - mean) ** 2
    assert np.allclose(both.epistemic, 0.4 * first.epistemic + 0.6 * second.epistemic + between)


# --- early stopping and drawn rows ----------------------------------------------------------------


def test_early_stopping_keeps_the_best_iterate(ppl):
    """Adam written out in NumPy on a linear model: the step with the best held-out score, and the point there."""
    problem = Conjugate.make(rows=12, noise=1.0)
    method = MAP(ppl=ppl, validation=0.25, steps=200)
    posterior = bnn.fit(problem.model, problem.x, problem.y, method, seed=3)
    left, out = _split(12, 0.25, 3)
    assert len(out) == 3
    design, y = problem.design, problem.y

    def score(w):
        residual = y[out] - design[out] @ w
        return float(np.mean(-0.5 * residual**2 / problem.noise**2 - np.log(problem.noise)))

    # Where it begins is where a fit that takes no step worth the name ends.
    still = bnn.fit(
        problem.model, problem.x, problem.y, MAP(ppl=ppl, steps=1, learning_rate=1e-300, polish=False), seed=3
    )
    w = Conjugate.flat(still.draws)[0, 0]
    first, second, best = np.zeros(4), np.zeros(4), (-np.inf, w, 0)
    for step in range(1, 201):
        gradient = w - design[left].T @ (y[left] - design[left] @ w) / problem.noise**2
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        w = w - 0.02 * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        if score(w) > best[0]:
            best = (score(w), w, step)
    assert 1 < best[2] < 200
    assert posterior.info.figures["best_step"] == best[2]
    assert np.allclose(Conjugate.flat(posterior.draws)[0, 0], best[1], rtol=1e-8)
    assert np.isclose(
        posterior.info.figures["validation_score"] + 0.5 * np.log(2 * np.pi), best[0], rtol=1e-8
    )
    assert "held out" in posterior.info.target
    assert any("might still have risen" in text for text in posterior.info.warnings)


def _split(rows: int, share: float, seed: int):
    @dataclass
    class Asked:
        rows: int
        seed: int

    return held_out(Asked(rows, seed), share)  # type: ignore[arg-type]


@pytest.mark.slow
def test_early_stopping_stops():
    """A network that can fit anything, under a prior that lets it: stopped early, it predicts better."""

    def flexible(x, y=None):
        f = bnn.mlp(x, [10, 1], activation="tanh", prior=priors.Normal(0.0, 10.0))
        bnn.observe(y, f, likelihoods.Gaussian(0.2))

    stopped = bnn.fit(flexible, X, Y, Ensemble(MAP(validation=0.2, steps=6000), 2))
    assert stopped.info.figures["converged"] == 1.0
    assert np.all(stopped.info.history["member_best_step"] < 4000)
    assert stopped.info.target.startswith("early stopping")
    for index, stop in enumerate(stopped.approximation.members):
        left, out = _split(25, 0.2, seed_of(index))
        mode = bnn.fit(flexible, X[left], Y[left], MAP(steps=3000), seed=seed_of(index))
        alone = dataclasses.replace(stopped, approximation=stop)
        score = alone.log_likelihood(X[out], Y[out]).mean()
        assert np.isclose(score, stopped.info.history["member_validation_score"][index])
        assert score > mode.log_likelihood(X[out], Y[out]).mean()


def test_bootstrap_members_are_fits_to_drawn_rows(ppl):
    problem = Conjugate.make(rows=20)
    posterior = bnn.fit(
        problem.model, problem.x, problem.y, Ensemble(MAP(ppl=ppl, steps=200), 3, bootstrap=True), seed=4
    )
    for index, found in enumerate(Conjugate.flat(posterior.draws)[0]):
        rows = np.random.default_rng(site_seed("bootstrap", seed_of(index, 4))).integers(20, size=20)
        assert len(np.unique(rows)) < 20
        drawn = Conjugate(problem.x[rows], problem.y[rows], problem.noise)
        assert np.allclose(found, drawn.mean, rtol=1e-6, atol=1e-8)
    assert "replacement" in posterior.info.target


def test_rows_that_belong_together_are_not_drawn():
    def coupled(x, y=None):
        bnn.coupled()
        bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(0.5))

    for method, instead in (
        (Ensemble(MAP(), 2, bootstrap=True), "bootstrap=False"),
        (MAP(validation=0.2), "validation=None"),
    ):
        with pytest.raises(UnsupportedError, match=f"taken apart.*; try {instead}$"):
            bnn.fit(coupled, X, Y, method)


# --- members that fail, and fits that are interrupted ---------------------------------------------

RUNS = itertools.count()


@dataclass(frozen=True)
class Constant(Method):
    """A point whose coordinates are the seed; fails where told, and counts how often it ran."""

    fails: tuple[int, ...] = ()
    interrupts: tuple[int, ...] = ()

    def run(self, problem, progress):
        if problem.seed in self.interrupts:
            raise KeyboardInterrupt
        next(RUNS)
        if problem.seed in self.fails:
            raise DivergenceError("the loss is not a number")
        progress.task("Constant", 1).close()
        u = {
            name: np.full(site.unconstrained_shape, problem.seed / 2**31)
            for name, site in problem.program.sites.items()
        }
        return Outcome(
            Point(u),
            history={"loss": np.arange(3.0)},
            figures={"converged": 1.0, "log_joint": -1.0},
            gradient_evaluations=3,
            warnings=("so far",),
        )


def test_a_failed_member_is_named():
    method = Constant(fails=(seed_of(1),))
    with pytest.raises(DivergenceError, match="member 2 of 3 failed: the loss is not a number"):
        bnn.fit(small_network, X, Y, Ensemble(method, 3))
    posterior = bnn.fit(small_network, X, Y, Ensemble(method, 3, tolerate=1))
    assert posterior.shape == (1, 2)
    assert posterior.info.figures["members"] == 2
    assert any("member 2 of 3 failed and is left out" in text for text in posterior.info.warnings)
    assert any(text == "all members: so far" for text in posterior.info.warnings)
    with pytest.raises(DivergenceError, match="member 3 of 3"):
        bnn.fit(small_network, X, Y, Ensemble(Constant(fails=(seed_of(1), seed_of(2))), 3, tolerate=1))


def test_one_of_those_fitted_together_fails(ppl, monkeypatch):
    begin = mode.starting_point

    def broken(problem, *arguments):
        u = begin(problem, *arguments)
        return {name: value * np.nan for name, value in u.items()} if problem.seed == seed_of(1) else u

    monkeypatch.setattr(mode, "starting_point", broken)
    method = MAP(ppl=ppl, steps=100, polish=False)
    posterior = bnn.fit(small_network, X, Y, Ensemble(method, 3, tolerate=1))
    assert posterior.shape == (1, 2)
    assert any(
        text.startswith("member 2 of 3 failed and is left out: MAP") for text in posterior.info.warnings
    )
    for name, value in posterior.draws.items():
        assert np.isfinite(value).all(), name
    losses = posterior.info.history["member_loss"]
    assert np.all(losses[-20:].mean(0) < losses[:20].mean(0))


def test_an_interrupted_ensemble_goes_on(tmp_path):
    undisturbed = bnn.fit(small_network, X, Y, Ensemble(Constant(), 3))
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(
            small_network,
            X,
            Y,
            Ensemble(Constant(interrupts=(seed_of(2),)), 3, checkpoint=tmp_path / "other"),
        )
    assert sorted(path.stem for path in (tmp_path / "other").iterdir()) == ["member0", "member1"]

    first = Ensemble(Constant(), 2, checkpoint=tmp_path / "kept")
    bnn.fit(small_network, X, Y, first)
    before = next(RUNS)
    again = bnn.fit(small_network, X, Y, dataclasses.replace(first, size=3))
    assert next(RUNS) == before + 2
    for name, value in undisturbed.draws.items():
        assert np.array_equal(value, again.draws[name]), name
    assert np.array_equal(undisturbed.info.history["member_loss"], again.info.history["member_loss"])
    assert again.info.figures == undisturbed.info.figures
    assert again.info.warnings == undisturbed.info.warnings
    assert again.info.gradient_evaluations == 9
    with pytest.raises(InputError, match="seed"):
        bnn.fit(small_network, X, Y, first, seed=1)
    with pytest.raises(InputError, match="member"):
        bnn.fit(small_network, X, Y, dataclasses.replace(first, member=Constant(fails=(5,))))


@dataclass(frozen=True)
class Together(Constant):
    """Fits as many at once as there are, and does not say whose failure a failure is."""

    def run_together(self, problems, progress):
        GROUPS.append(len(problems))
        if any(problem.seed in self.fails for problem in problems):
            raise DivergenceError("one of them")
        return [self.run(problem, progress) for problem in problems]


GROUPS: list = []


def test_the_chains_of_one_member_are_no_sample(monkeypatch):
    """The others, which ran at the same time, are not run again for it."""
    judged: list[int] = []
    outcome = Sampler.outcome

    def refused(self, sampled, *arguments):
        judged.append(sampled.problem.seed)
        if sampled.problem.seed == seed_of(1):
            raise DivergenceError("a tuning that has collapsed")
        return outcome(self, sampled, *arguments)

    monkeypatch.setattr(Sampler, "outcome", refused)
    member = NUTS(draws=6, warmup=6, chains=1, max_tree_depth=2)
    posterior = bnn.fit(small_network, X, Y, Ensemble(member, 3, tolerate=1))
    assert judged == [seed_of(index) for index in range(3)]
    assert posterior.shape == (2, 6)
    assert any("member 2 of 3 failed and is left out" in text for text in posterior.info.warnings)
    with pytest.raises(DivergenceError, match="member 2 of 3 failed: a tuning"):
        bnn.fit(small_network, X, Y, Ensemble(member, 3))


def test_a_failure_of_several_at_once_is_looked_for_one_by_one():
    GROUPS.clear()
    method = Together(fails=(seed_of(2),))
    with pytest.raises(DivergenceError, match="member 3 of 4 failed: the loss is not a number"):
        bnn.fit(small_network, X, Y, Ensemble(method, 4))
    before = next(RUNS)
    posterior = bnn.fit(small_network, X, Y, Ensemble(method, 4, together=2, tolerate=1))
    assert posterior.shape == (1, 3)
    assert GROUPS == [4, 2, 2]
    # Two at once, and the others once each: those that are fitted are not fitted again.
    assert next(RUNS) == before + 5


@dataclass(frozen=True)
class Keeper(Constant):
    checkpoint: str | None = None

    def run(self, problem, progress):
        FOLDERS.append(self.checkpoint)
        return super().run(problem, progress)


FOLDERS: list = []


def test_a_member_keeps_its_own_checkpoints_within(tmp_path):
    FOLDERS.clear()
    bnn.fit(small_network, X, Y, Ensemble(Keeper(), 2, checkpoint=tmp_path))
    bnn.fit(small_network, X, Y, Ensemble(Keeper(), 2))
    assert [*FOLDERS] == [tmp_path / "within0", tmp_path / "within1", None, None]
    with pytest.raises(InputError, match="checkpoint of the ensemble"):
        Ensemble(Keeper(checkpoint="here"))


# --- settings -------------------------------------------------------------------------------------


def test_the_member_decides_about_systems():
    assert Ensemble(MAP(ppl="pyro")).ppl == "pyro"
    assert Ensemble(MAP(), ppl="pyro").member.ppl == "pyro"
    moved = dataclasses.replace(Ensemble(MAP(dtype="float32")), ppl="pyro")
    assert (moved.member.ppl, moved.member.dtype, moved.dtype) == ("pyro", "float32", "float32")
    assert Ensemble(SVI()).serves_priors == SVI.serves_priors
    assert Ensemble(Laplace()).serves_local is False
    assert Ensemble(SVI(stream=True, batch_size=5)).settings()["stream"] is True


def test_titles_say_which_member_is_fitted():
    titles = []

    class Heard:
        def task(self, title, total):
            titles.append(title)
            return bnn.errors and _Silent()

    bnn.fit(small_network, X, Y, Ensemble(Constant(), 2), progress=Heard())
    assert titles == ["Constant, member 1 of 2", "Constant, member 2 of 2"]


class _Silent:
    def update(self, done, **figures):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"member": MAP}, r"member=MAP\(\)"),
        ({"member": MAP(), "size": 0}, "at least 1"),
        ({"member": MAP(), "size": 2, "tolerate": 2}, "fewer than the 2 members"),
        ({"member": MAP(), "together": 0}, "at least 1"),
        ({"member": MAP(), "bootstrap": 1}, "True or False"),
        ({"member": SVI(checkpoint="here")}, "checkpoint of the ensemble"),
        ({"member": MAP(validation=0.1), "bootstrap": True}, "both sides"),
    ],
)
def test_impossible_settings(settings, said):
    with pytest.raises(InputError, match=said):
        Ensemble(**settings)


def test_impossible_early_stopping():
    with pytest.raises(InputError, match="between 0 and 1"):
        MAP(validation=1.0)
    with pytest.raises(InputError, match="one start"):
        MAP(validation=0.1, restarts=2)


def test_names_of_approximations_in_files_are_a_fixed_list():
    with pytest.raises(bnn.errors.UnknownNameError, match="approximation"):
        approximation_class("os:system")
