"""Records what nanochat's own code computes for the checkpoint of tests/support/nanochat.py, on a CPU:

    python benchmarks/nanochat_values.py FOLDER > tests/golden/nanochat.json

FOLDER: a checkout of nanochat, at the commit that titanlite/contrib/nanochat.py names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), sys.argv[1]]

from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]  # noqa: E402

from tests.support.nanochat import CONFIG, random_tensors, tokens  # noqa: E402


def main() -> None:
    net = GPT(GPTConfig(**CONFIG))
    net.init_weights()  # makes the rotary tables, too
    net.load_state_dict(random_tensors())
    inputs, targets = tokens()[:, :-1].contiguous(), tokens()[:, 1:].contiguous()
    logits = net(inputs)
    loss = net(inputs, targets, loss_reduction="sum")
    loss.backward()
    values = {
        "torch": torch.__version__,
        "loss": loss.item(),
        "logits": [[round(x, 6) for x in row] for row in logits[:, ::51, :8].flatten(0, 1).tolist()],
        "gradient_norms": {name: p.grad.norm().item() for name, p in net.named_parameters()},
    }
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
