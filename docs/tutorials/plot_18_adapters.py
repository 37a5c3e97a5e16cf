"""
A transformer with Bayesian adapters
====================================

A network of ``transformers`` with LoRA adapters of ``peft`` is a layer of a model. Its adapters and its head get priors
and a posterior; the network under them is held as it is.
"""

# %%
# Text from the documentation of Python itself: which module does a passage of twenty words come from?
import importlib
import re
import warnings
import zlib

import matplotlib.pyplot as plt
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors

WORDS, TOKENS = 20, 600


def passages(modules, count):
    """Tokens (rows, WORDS), a number below TOKENS for each word, and the place of the module in the list."""
    rows, labels = [], []
    for label, name in enumerate(modules):
        module = importlib.import_module(name)
        texts = [getattr(each, "__doc__", None) or "" for each in (module, *vars(module).values())]
        words = re.findall(r"[a-z]+", " ".join(map(str, texts)).lower())
        tokens = [1 + zlib.crc32(word.encode()) % (TOKENS - 1) for word in words]
        starts = np.linspace(0, len(tokens) - WORDS, count).astype(int)
        rows += [tokens[start : start + WORDS] for start in starts]
        labels += [label] * count
    return np.array(rows), np.array(labels)


# %%
# A small BERT learns to tell four modules apart. A real one would come from ``from_pretrained`` here.
torch.manual_seed(0)
config = BertConfig(
    vocab_size=TOKENS,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=4,
    max_position_embeddings=WORDS,
)
network = BertForSequenceClassification(config)
old_tokens, old_labels = passages(["argparse", "random", "threading", "tarfile"], 200)
optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(60):
    optimiser.zero_grad()
    network(input_ids=torch.tensor(old_tokens), labels=torch.tensor(old_labels)).loss.backward()
    optimiser.step()

# %%
# Three other modules, with few passages to learn from. LoRA adds adapters to the queries and values of the attention,
# and a new head.
tokens, labels = passages(["decimal", "socket", "statistics"], 100)
order = np.random.default_rng(0).permutation(len(labels))
train, test = order[:120], order[120:220]
network.num_labels = network.config.num_labels = 3
network.classifier = torch.nn.Linear(32, 3)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    adapted = get_peft_model(
        network, LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules=["query", "value"])
    )


class Logits(torch.nn.Module):
    """A module gives an array: the logits of the network."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, tokens):
        return self.network(input_ids=tokens).logits


layer = Logits(adapted)
prior = {"*lora_*": priors.Normal(0.0, 0.5), "*modules_to_save*": priors.Normal(0.0, 0.5), "*": None}


# %%
# The adapters and the head have priors; ``None`` holds everything else at its value. ``mode="eval"`` runs the network
# without dropout, and leaves it in training.
def model(x, y=None):
    f = bnn.module("net", x, layer, prior, mode="eval")
    bnn.observe(y, f, likelihoods.Categorical())


sites = bnn.zoo.sketch(model, tokens[:2]).sites
print(
    sum(np.prod(site.shape) for site in sites),
    "random weights of",
    sum(p.numel() for p in network.parameters()),
)

# %%
# Plain LoRA is the mode. Mean-field SVI and Laplace give it uncertainty; so do IVON, NUTS and others.
settings = {"ppl": "pyro", "dtype": "float32", "steps": 150}
methods = {
    "LoRA (MAP)": bnn.MAP(**settings),
    "mean field": bnn.SVI(elbo_draws=5, **settings),
    "Laplace": bnn.Laplace(structure="kron", **settings),
}
said = {}
for name, method in methods.items():
    posterior = bnn.fit(model, tokens[train], labels[train], method)
    seen = posterior.predict(tokens[test], draws=None if name == "LoRA (MAP)" else 50)
    right = np.mean(seen.probabilities.argmax(1) == labels[test])
    said[name] = seen.probabilities.max(1).mean(), right
    print(f"{name:11} accuracy {right:.2f}, log score {seen.log_prob(labels[test]).mean():.2f}")

# %%
# With so few passages each is right in about half of its answers. The mode says that it is right far more often than
# that, mean field a little.
figure, axes = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
for shift, values, colour, words in zip(
    (-0.18, 0.18),
    zip(*said.values(), strict=True),
    ("#D55E00", "#0072B2"),
    ("mean largest probability", "share of right answers"),
    strict=True,
):
    axes.bar(np.arange(len(said)) + shift, values, 0.34, color=colour, label=words)
axes.set_xticks(range(len(said)), list(said))
axes.set_ylim(0.0, 1.0)
axes.legend(loc="upper right")
plt.show()
