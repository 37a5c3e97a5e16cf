"""Networks of transformers with adapters of peft: what they compute, what is sampled, and which methods fit them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PRIOR = {"*lora_*": priors.Normal(0.0, 0.3), "*modules_to_save*": priors.Normal(0.0, 0.3), "*": None}
ROWS, LENGTH, CLASSES = 24, 6, 3


class Logits(torch.nn.Module):
    """The logits of a network of transformers for tokens and a mask. With an axis for the positions that look, the mask
    is taken as it is, whatever is in it, so that torch can map over rows."""

    def __init__(self, network: Any):
        super().__init__()
        self.network = network

    def forward(self, x: Any) -> Any:
        tokens, mask = x["tokens"], x["mask"].bool()
        each = mask[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        return self.network(input_ids=tokens, attention_mask=each).logits


def adapted() -> Any:
    """A BERT of random weights with adapters of its queries and values, in training as `peft` leaves it."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        # peft uses a name that transformers has given up.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            num_labels=CLASSES,
            max_position_embeddings=LENGTH,
        )
        adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        return peft.get_peft_model(transformers.BertForSequenceClassification(config), adapters)


def rows() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    mask = (np.arange(LENGTH) < rng.integers(3, LENGTH + 1, ROWS)[:, None]).astype(np.int64)
    tokens = rng.integers(1, 20, (ROWS, LENGTH)) * mask
    return {"tokens": tokens, "mask": mask}, tokens[:, 0] % CLASSES


def model_of(network: Any, prior: Any = PRIOR) -> Any:
    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.module("net", x, network, prior, mode="eval"), likelihoods.Categorical())

    return model


def test_only_adapters_and_the_head_are_sampled_and_the_rest_is_the_network() -> None:
    inner = adapted()
    assert inner.training
    x, _ = rows()
    trained = {name: value for name, value in inner.named_parameters() if value.requires_grad}
    sketch = bnn.zoo.sketch(model_of(Logits(inner)), x)
    assert {site.name for site in sketch.sites} == {f"net.network.{name}" for name in trained}
    w = {f"net.network.{name}": value.detach().double() for name, value in trained.items()}
    found = bnn.network_function(model_of(Logits(inner)))(w, x)
    with torch.no_grad():
        expected = (
            inner.double()
            .eval()(input_ids=torch.tensor(x["tokens"]), attention_mask=torch.tensor(x["mask"]))
            .logits
        )
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "method",
    [
        bnn.MAP(ppl="pyro", steps=5),
        bnn.SVI(ppl="pyro", steps=5, elbo_draws=2),
        bnn.IVON(ppl="pyro", steps=5, elbo_draws=2),
        bnn.Laplace(ppl="pyro", steps=5, structure="kron"),
        bnn.NUTS(ppl="pyro", draws=4, warmup=4, chains=1, max_tree_depth=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_methods_fit_the_adapters_and_leave_the_network_as_it_was(method: bnn.Method) -> None:
    network, (x, y) = Logits(adapted()), rows()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    posterior = bnn.fit(model_of(network), x, y, method)
    assert np.isfinite(posterior.predict(x).log_prob(y)).all()
    assert network.training
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_bayesian_head_on_a_network_that_is_held() -> None:
    """The last layer in closed form; the body has no random variables at all."""
    body, (x, y) = adapted().base_model.model.bert, rows()

    class Pooled(Logits):
        def forward(self, x: Any) -> Any:
            mask = x["mask"].bool()
            each = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
            return self.network(input_ids=x["tokens"], attention_mask=each).pooler_output

    network = Pooled(body)

    def model(x: Any, y: Any = None) -> None:
        h = bnn.module("body", x, network, {"*": None}, mode="eval")
        bnn.observe(y, bnn.dense("head", h, CLASSES), likelihoods.Categorical())

    guide = {"last_layer": "matrixnormal"}
    method = bnn.SVI(
        ppl="pyro", guide=guide, estimator="closed_form", divergence="analytic", steps=20, elbo_draws=2
    )
    posterior = bnn.fit(model, x, y, method)
    assert set(posterior.draws) == {"head.weight", "head.bias"}
