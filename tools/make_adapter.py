"""Writes a random LoRA adapter for a model, in PEFT's format, to try adapters with.

    python -m tools.make_adapter DIRECTORY                # for the demo model
    python -m tools.make_adapter DIRECTORY --model DIR --seed 1

Equal options give equal weights.
"""

# ruff: noqa: T201 - its output is what it prints

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.demo_model import demo_model_path

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(directory: Path, model: Path, *, rank: int = 8, seed: int = 0, strength: float = 0.5) -> int:
    """Writes an adapter for the linear layers of `model` that are named as TARGETS. It changes the weights of each by
    the share `strength` of their norm. Returns the number of layers; raises ValueError if there are none."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for key in sorted(weights.keys()):
                path = key.removesuffix(".weight")
                if path != key and path.rpartition(".")[2] in TARGETS:
                    weight = weights.get_tensor(key).float()  # [out, in]
                    down = torch.randn(rank, weight.shape[1], generator=generator)
                    up = torch.randn(weight.shape[0], rank, generator=generator)
                    up *= strength * weight.norm() / (up @ down).norm()
                    tensors[f"base_model.model.{path}.lora_A.weight"] = down
                    tensors[f"base_model.model.{path}.lora_B.weight"] = up
    if not tensors:
        raise ValueError(f"{model} has no layers named {', '.join(TARGETS)}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return len(tensors) // 2


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_adapter", description="Writes a random LoRA adapter.")
    parser.add_argument("directory", type=Path, help="Where it is written.")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="Directory of the model.")
    parser.add_argument("--rank", type=int, default=8, help="Rank of its matrices. (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="Of its random numbers. (default: 0)")
    parser.add_argument("--strength", type=float, default=0.5, help="How much it changes the weights. (default: 0.5)")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} is not the directory of a model")
    if args.rank < 1:
        parser.error(f"--rank: must be at least 1, got {args.rank}")
    options = {"rank": args.rank, "seed": args.seed, "strength": args.strength}
    num_layers = make_adapter(args.directory, args.model, **options)
    print(f"{args.directory}: rank {args.rank}, {num_layers} layers")


if __name__ == "__main__":
    main()
