"""Networks of a few lines: names, shapes, and the same numbers in both systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, ops
from ppl_bnn.core.errors import ModelError
from ppl_bnn.language.layers.basic import images
from ppl_bnn.language.layers.networks import cnn, lstm_classifier, resnet, transformer
from tests.layer_oracles import Substitute, asked, log_joint_and_predictor, values_of

LABELS = np.arange(6) % 3
IMAGES = np.random.default_rng(53).normal(size=(6, 6, 5, 2))
TOKENS = np.random.default_rng(5301).integers(0, 4, size=(6, 5))
# In every row something is there.
TOKENS[:, 0] = 0


def of_lstm(x: Any) -> Any:
    return lstm_classifier(x, size=4, width=3, outputs=3, mask=x != 3)


def of_transformer(x: Any) -> Any:
    return transformer(x, outputs=3, width=4, heads=2, size=4, mask=x != 3)


NETWORKS: dict[str, tuple[Callable[[Any], Any], np.ndarray]] = {
    "cnn": (lambda x: cnn(x, [2], [3, 3], activation="tanh"), IMAGES),
    "resnet": (lambda x: resnet(x, [2, 3], 3), IMAGES),
    "lstm_classifier": (of_lstm, TOKENS),
    "transformer": (of_transformer, TOKENS),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_the_same_in_both_systems(name: str) -> None:
    network, x = NETWORKS[name]

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, network(x), likelihoods.Categorical())

    ours, theirs = (log_joint_and_predictor(ppl, model, x, LABELS) for ppl in ("numpyro", "pyro"))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-10)
    for site, gradient in ours[1].items():
        np.testing.assert_allclose(gradient, theirs[1][site], rtol=1e-10, atol=1e-10, err_msg=site)
    np.testing.assert_allclose(ours[2], theirs[2], rtol=0, atol=1e-10)


def test_names_and_shapes() -> None:
    def shapes(network: Callable[[], Any]) -> dict[str, tuple[int, ...]]:
        return {site: given.shape for site, given in asked(network).items()}

    assert shapes(lambda: cnn(IMAGES, [2, 4], [5, 3])) == {
        "conv0.weight": (3, 3, 2, 2),
        "conv0.bias": (2,),
        "conv1.weight": (3, 3, 2, 4),
        "conv1.bias": (4,),
        # 6 x 5 to 3 x 2 to 1 x 1 places
        "hidden0.weight": (4, 5),
        "hidden0.bias": (5,),
        "output.weight": (5, 3),
        "output.bias": (3,),
    }
    assert shapes(lambda: cnn(IMAGES[:, :, 0], [2], [3]))["output.weight"] == (6, 3)
    stages = shapes(lambda: resnet(IMAGES, [4, 6], 3, blocks=2))
    convolutions = {name: shape for name, shape in stages.items() if len(shape) == 4}
    assert convolutions == {
        "stem.weight": (3, 3, 2, 4),
        "stage0.block0.conv0.weight": (3, 3, 4, 4),
        "stage0.block0.conv1.weight": (3, 3, 4, 4),
        "stage0.block1.conv0.weight": (3, 3, 4, 4),
        "stage0.block1.conv1.weight": (3, 3, 4, 4),
        "stage1.block0.conv0.weight": (3, 3, 4, 6),
        "stage1.block0.conv1.weight": (3, 3, 6, 6),
        "stage1.block0.shortcut.weight": (1, 1, 4, 6),
        "stage1.block1.conv0.weight": (3, 3, 6, 6),
        "stage1.block1.conv1.weight": (3, 3, 6, 6),
    }
    plain = shapes(lambda: resnet(IMAGES[:, :, 0], [4], 3, activation="silu"))
    assert plain["stem.weight"] == (3, 2, 4)
    assert not any("threshold" in name for name in plain)
    features = shapes(lambda: transformer(IMAGES[:, :, 0], 3, width=4, heads=2, blocks=2))
    assert features["embedding.weight"] == (2, 4)
    assert features["positions.weight"] == (6, 4)
    assert {name.split(".")[0] for name in features} == {
        "embedding", "positions", "block0", "block1", "norm", "output",
    }  # fmt: skip


def test_rows_of_pixels_are_images(rng: np.random.Generator) -> None:
    for pixels, shape in ((64, (8, 8)), (10, (2, 5)), (7, (1, 7)), (1, (1, 1))):
        assert images(np.zeros((3, pixels))).shape == (3, *shape, 1)
    numbers = np.arange(12.0)
    np.testing.assert_array_equal(images(numbers[None])[0, :, :, 0], numbers.reshape(3, 4))
    for x in (IMAGES, IMAGES[:, :, 0]):
        assert images(x) is x
    pixels = rng.normal(size=(6, 12))
    pictures = pixels.reshape(6, 3, 4, 1)
    networks: tuple[Callable[[Any], Any], ...] = (
        lambda x: cnn(x, [2], [3]),
        lambda x: resnet(x, [2, 3], 3),
        lambda x: lstm_classifier(x, None, 3, 3),
        lambda x: transformer(x, 3, 4, 2, patch=2),
    )
    for network in networks:
        sites = asked(lambda network=network: network(pictures))
        with Substitute(values_of({name: site.shape for name, site in sites.items()})):
            np.testing.assert_array_equal(network(pixels), network(pictures))


def test_patches_are_the_positions_of_a_transformer() -> None:
    # Three patches across five pixels: zeros stand in the sixth column.
    filled = np.pad(IMAGES, ((0, 0), (0, 0), (0, 1), (0, 0)))
    cut = filled.reshape(6, 3, 2, 3, 2, 2).transpose(0, 1, 3, 2, 4, 5).reshape(6, 9, 8)
    sites = asked(lambda: transformer(IMAGES, 3, 4, 2, patch=2))
    assert sites["embedding.weight"].shape == (8, 4)
    assert sites["positions.weight"].shape == (9, 4)
    with Substitute(values_of({name: site.shape for name, site in sites.items()})):
        whole, by_hand = transformer(IMAGES, 3, 4, 2, patch=2), transformer(cut, 3, 4, 2)
    np.testing.assert_allclose(whole, by_hand, rtol=0, atol=1e-12)


def test_a_memory_reads_features_step_by_step() -> None:
    sites = asked(lambda: lstm_classifier(IMAGES, None, 3, 2))
    assert {name: site.shape for name, site in sites.items()} == {
        # A row of the image, 5 places of 2 channels
        "lstm.input.weight": (10, 12),
        "lstm.input.bias": (12,),
        "lstm.state.weight": (3, 12),
        "output.weight": (3, 2),
        "output.bias": (2,),
    }
    mask = np.array([[1, 1, 1, 0, 0, 0]] * 6)
    with Substitute(values_of({name: site.shape for name, site in sites.items()})):
        masked = lstm_classifier(IMAGES, None, 3, 2, mask=mask)
        short = lstm_classifier(IMAGES[:, :3].reshape(6, 3, 10), None, 3, 2)
    np.testing.assert_allclose(masked, short, rtol=0, atol=1e-12)


def test_a_pooling_of_ones_own() -> None:
    def network(**pool: Any) -> Any:
        return cnn(IMAGES, [2], [3], **pool)

    sites = asked(lambda: network(pool=lambda h: ops.avg_pool(h, 2, padding="same")))
    # 6 x 5 to 3 x 3 places, where windows of 2 that fit whole are 3 x 2.
    assert sites["output.weight"].shape == (18, 3)
    values = values_of({name: site.shape for name, site in asked(network).items()})
    with Substitute(values):
        np.testing.assert_array_equal(network(), network(pool=lambda h: ops.max_pool(h, 2)))


def test_what_the_mask_leaves_out_changes_nothing() -> None:
    for network in (of_lstm, of_transformer):
        x = np.array([[0, 1, 2, 3, 3]])
        values = values_of({name: site.shape for name, site in asked(lambda n=network, x=x: n(x)).items()})
        if network is of_lstm:
            short = x[:, :3]
        else:
            short, values["positions.weight"] = x, values["positions.weight"].copy()
        with Substitute(values):
            whole = network(x)
            if network is of_transformer:
                # Another vector at positions that are not there.
                values["positions.weight"][3:] += 5.0
            np.testing.assert_allclose(network(short), whole, rtol=0, atol=1e-12)


def test_a_prior_is_handed_on() -> None:
    prior = bnn.priors.Laplace(0.0, 0.1)
    for network in (
        lambda: cnn(IMAGES, [2], [3], prior=prior),
        lambda: resnet(IMAGES, [2, 3], 3, prior=prior),
        lambda: lstm_classifier(TOKENS, 4, 3, 3, prior=prior),
        lambda: transformer(TOKENS, 3, 4, 2, size=4, prior=prior),
    ):
        for name, site in asked(network).items():
            table = name in ("embedding.weight", "positions.weight")
            wanted = "Laplace" if name.endswith("weight") and not table else None
            assert wanted is None or site.family == wanted, name


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: cnn(IMAGES, [], [3]), "cnn: expected a list of at least one number of channels"),
        (lambda: resnet(IMAGES, 3, 3), "resnet: expected a list of at least one number of channels; got 3"),  # pyright: ignore
        (lambda: resnet(IMAGES, [3], 3, blocks=0), "a positive whole number as blocks"),
        (lambda: transformer(IMAGES, 3, 4, 2), r"transformer: expected sequences"),
        (lambda: transformer(TOKENS, 3, 5, 2, size=4), "channels that 2 heads can share equally"),
        (lambda: transformer(TOKENS, 3, 4, 2, size=4, patch=2), "expected either symbols or patches"),
        (lambda: lstm_classifier(ops.asarray(TOKENS, like=IMAGES) + 0.5, 4, 2, 3), "expected whole numbers"),
    ],
)
def test_impossible_networks_are_refused(action: Callable[[], Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        asked(action)


def test_a_memory_is_read_at_its_last_state() -> None:
    x = np.array([[0, 1, 2], [0, 1, 1]])
    values = values_of({name: site.shape for name, site in asked(lambda: of_lstm(x)).items()})
    with Substitute(values):
        whole, one = of_lstm(x), of_lstm(x[:, :1])
    # Both rows begin alike, and what comes after tells them apart.
    assert np.abs(whole[0] - whole[1]).max() > 1e-3
    np.testing.assert_array_equal(one[0], one[1])


def test_a_transformer_averages_what_is_there(rng: np.random.Generator) -> None:
    x = np.array([[0, 1, 2, 3, 3]])
    values = values_of({name: site.shape for name, site in asked(lambda: of_transformer(x)).items()})
    short = values | {"positions.weight": values["positions.weight"][:3]}
    with Substitute(values):
        padded = of_transformer(x)
    with Substitute(short):
        alone = of_transformer(x[:, :3])
    np.testing.assert_allclose(padded, alone, rtol=0, atol=1e-12)
