"""What the training examples share: a text made up by rule, a small transformer that learns it, and a report."""

import argparse
import functools
import os
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import iris_pg

CONTEXT, BATCH = 64, 8  # characters in a row, rows of a rank


@functools.cache
def text(sentences: int = 2000) -> str:
    """Return sentences of a small grammar, the same ones every time."""
    draw = random.Random(0).choice
    who = ["the cat", "a dog", "my sister", "the old man", "nobody", "one of the twins", "the baker"]
    does = ["sees", "follows", "likes", "has lost", "draws", "cannot find", "thinks of"]
    what = ["a ball", "the red house", "two birds", "the river", "some bread", "a letter", "the moon"]
    when = ["today", "every morning", "after lunch", "when it rains", "again and again", "in winter", "at last"]
    return " ".join(f"{draw(who)} {draw(does)} {draw(what)} {draw(when)}.".capitalize() for _ in range(sentences))


class Layer(nn.Module):
    """Causal attention, and a perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """Rows of characters [rows, CONTEXT + 1] -> the mean loss of predicting each from those before it."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same on every rank
        alphabet = len(set(text()))
        self.characters, self.places = nn.Embedding(alphabet, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width, heads=4) for _ in range(layers))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, alphabet)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.characters(rows[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.scores(self.norm(x)).flatten(0, 1), rows[:, 1:].flatten())


def arguments(description: str) -> argparse.ArgumentParser:
    """Return the command line that the training examples have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    backends = ("iris", "gloo", "nccl")
    parser.add_argument("--backend", choices=backends, default="iris", help="of the training (%(default)s)")
    parser.add_argument(
        "--engine", choices=("auto", "cu", "sdma"), default="auto", help="of backend iris (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--compare", choices=backends, help="train again over this backend, and compare")
    return parser


def start(args: argparse.Namespace) -> torch.device:
    """Make the default group; return where tensors go."""
    torch.set_num_threads(1)  # the ranks share this machine's cores
    device = torch.device("cpu")
    if "nccl" in (args.backend, args.compare):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend, pg_options=options(args, args.backend))
    return device


def options(args: argparse.Namespace, backend: str) -> iris_pg.Options | None:
    """Return the options of a group of ``backend``."""
    return iris_pg.Options(engine=args.engine) if backend == "iris" else None


def groups(args: argparse.Namespace) -> dict[str, dist.ProcessGroup]:
    """Return backend -> group of all ranks, for each training."""
    found = {args.backend: dist.group.WORLD}
    if args.compare and args.compare != args.backend:
        found[args.compare] = dist.new_group(backend=args.compare, pg_options=options(args, args.compare))
    return found


class Curve:
    """The losses of one training, the mean of all ranks, and how long the steps took."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def train(self, model: nn.Module, group: dist.ProcessGroup, steps: int, device: torch.device) -> "Curve":
        """Train ``model``, whose gradients come over ``group`` already."""
        letters = sorted(set(text()))
        numbers = torch.tensor([letters.index(letter) for letter in text()])
        draw = torch.Generator().manual_seed(dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(steps):
            begins = torch.randint(len(numbers) - CONTEXT, (BATCH,), generator=draw)
            rows = torch.stack([numbers[i : i + CONTEXT + 1] for i in begins]).to(device)
            start = time.perf_counter()
            loss = model(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean, group=group)
            self.losses.append(mean.item() / dist.get_world_size())
            self.seconds.append(time.perf_counter() - start)
        return self

    @property
    def milliseconds(self) -> float:
        """Of a step, once everything is set up."""
        return 1e3 * statistics.median(self.seconds[len(self.seconds) // 5 :])


def report(curves: dict[str, Curve]) -> None:
    """Print the curves on rank 0, side by side.

    Raises:
        SystemExit: they differ by more than the order in which numbers are added explains.
    """
    (backend, curve), *others = curves.items()
    names = [backend, *(name for name, _ in others)]
    differences = [max(abs(a - b) for a, b in zip(curve.losses, c.losses, strict=True)) for _, c in others]
    if dist.get_rank() == 0:
        print("step" + "".join(f"{name:>10}" for name in names))
        last = len(curve.losses) - 1
        for step in sorted({*range(0, last + 1, max(last // 10, 1)), last}):
            print(f"{step:4}" + "".join(f"{c.losses[step]:10.4f}" for c in curves.values()))
        for (name, other), difference in zip(others, differences, strict=True):
            ratio = other.milliseconds / curve.milliseconds
            print(f"largest difference between the losses over {backend} and {name}: {difference:.2g}")
            print(
                f"a step takes {curve.milliseconds:.1f} ms over {backend} and {other.milliseconds:.1f} ms over {name}, "
                f"{ratio:.2f} times as long"
            )
    # Two numbers have one sum. With more, each backend adds them in an order of its own, and the differences in the
    # last bit grow from step to step.
    allowed = 0 if dist.get_world_size() <= 2 else 1e-4
    if any(difference > allowed for difference in differences):
        raise SystemExit(f"the losses differ by more than {allowed}")
