"""Does an implementation compute the loss? Held to a float64 truth by the rule of tests/numerics.py.

An implementation agrees when loss and gradients are no further from the truth than plain torch in the same dtype is,
plus one rounding: of the loss relative to the sum of the tokens' absolute losses, of a gradient relative to its own
norm, in the maximum norm and in the 2-norm. The whole problem is compared, in chunks of tokens.

Dims: T tokens, Vp vocabulary columns, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .plain_loss import arguments, token_losses
from .problem import Problem

SMALLEST_EPS = 1e-6


@dataclass(frozen=True)
class Error:
    """Distances from the truth, relative to its norm."""

    ours: float
    torch: float
    eps: float

    @property
    def agrees(self) -> bool:
        # false for a NaN
        return self.ours <= self.torch + self.eps


@dataclass(frozen=True)
class Agreement:
    """What was compared, by name ("loss", "dweight max", ...)."""

    errors: dict[str, Error]

    @property
    def agrees(self) -> bool:
        return all(e.agrees for e in self.errors.values())

    @property
    def complaint(self) -> str:
        """The distances that are too large, in one line."""
        wrong = [
            f"{name} error {e.ours:.1e} > torch {e.torch:.1e} + {e.eps:.1e}"
            for name, e in self.errors.items()
            if not e.agrees
        ]
        return "; ".join(wrong)


class _Distance:
    """Maximum and 2-norm of actual - truth, and of the truth, over parts that come one by one."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, 2, dtype=torch.float64, device=device)

    def add(self, actual: Tensor, truth: Tensor) -> None:
        for row, x in zip(self._sums, (actual.double() - truth, truth), strict=True):
            # unlike max() of Python, torch.maximum keeps a NaN
            row[0] = torch.maximum(row[0], x.abs().max())
            row[1] += x.square().sum()

    def relative(self, name: str) -> dict[str, float]:
        (d_max, d_square), (t_max, t_square) = self._sums.tolist()
        if not (t_max > 0 and t_square < float("inf")):
            raise RuntimeError(f"the true {name} must be finite and not 0, its largest value is {t_max}")
        return {f"{name} max": d_max / t_max, f"{name} l2": (d_square / t_square) ** 0.5}


class Judge:
    """The truth of one problem, and how far plain torch in the operands' dtype is from it."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        rounding = max(SMALLEST_EPS, torch.finfo(problem.size.dtype).eps / 2)
        # given logits are exact; those of a head are themselves rounded
        self._loss_eps = SMALLEST_EPS if problem.level == "logits" else rounding
        self._eps = rounding
        self._loss = self._loss_torch = self._loss_scale = 0.0
        self._gradients: tuple[Tensor, ...] = ()  # dhidden [T, H] and dweight [Vp, H]; dlogits are never kept
        self._torch = self._learn_head(*problem.operands) if problem.level == "head" else self._learn_logits()

    def __call__(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> Agreement:
        """Raises ValueError for gradients of the wrong number, shape or dtype."""
        expected = [(list(x.shape), x.dtype) for x in self._problem.operands]
        got = [(list(x.shape), x.dtype) for x in gradients]
        if got != expected:
            raise ValueError(f"gradients must be {expected}, got {got}")
        theirs = abs(self._loss_torch - self._loss) / self._loss_scale
        errors = {"loss": Error(abs(float(loss) - self._loss) / self._loss_scale, theirs, self._loss_eps)}
        found = self._head_errors(*gradients) if self._problem.level == "head" else self._logits_errors(*gradients)
        return Agreement(errors | {name: Error(x, self._torch[name], self._eps) for name, x in found.items()})

    def _learn_logits(self) -> dict[str, float]:
        distance = _Distance(self._problem.target.device)
        for at in self._problem.chunks():
            logits = self._problem.logits(at)
            truth, truth_losses = _gradient(self._problem, at, logits.double())
            dlogits, losses = _gradient(self._problem, at, logits)
            self._add_losses(truth_losses, losses)
            distance.add(dlogits, truth)
        return distance.relative("dlogits")

    def _logits_errors(self, dlogits: Tensor) -> dict[str, float]:
        distance = _Distance(dlogits.device)
        for at in self._problem.chunks():
            truth, _ = _gradient(self._problem, at, self._problem.logits(at).double())
            distance.add(dlogits[at], truth)
        return distance.relative("dlogits")

    def _learn_head(self, hidden: Tensor, weight: Tensor) -> dict[str, float]:
        weight64 = weight.double()
        dhidden64, dweight64 = torch.zeros_like(hidden, dtype=torch.float64), torch.zeros_like(weight64)
        dhidden = torch.zeros_like(hidden)
        # one product over all tokens would sum in float32 and round once
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        for at in self._problem.chunks():
            hidden64 = hidden[at].double()
            truth, truth_losses = _gradient(self._problem, at, hidden64 @ weight64.T)
            torch.mm(truth, weight64, out=dhidden64[at])
            dweight64.addmm_(truth.T, hidden64)
            dlogits, losses = _gradient(self._problem, at, self._problem.logits(at))
            torch.mm(dlogits, weight, out=dhidden[at])
            dweight.addmm_(dlogits.T.float(), hidden[at].float())
            self._add_losses(truth_losses, losses)
        self._gradients = dhidden64, dweight64
        return self._head_errors(dhidden, dweight.to(weight.dtype))

    def _head_errors(self, *gradients: Tensor) -> dict[str, float]:
        found = {}
        for name, actual, truth in zip(("dhidden", "dweight"), gradients, self._gradients, strict=True):
            distance = _Distance(actual.device)
            # in parts: a float64 copy of the whole would take as much memory again
            for part, true_part in zip(actual.split(4096), truth.split(4096), strict=True):
                distance.add(part, true_part)
            found |= distance.relative(name)
        return found

    def _add_losses(self, truth: Tensor, plain: Tensor) -> None:
        self._loss += float(truth.sum())
        self._loss_scale += float(truth.abs().sum())
        self._loss_torch += float(plain.sum())


def _gradient(problem: Problem, at: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
    """dlogits of these tokens by autograd, in the dtype of logits, and the tokens' losses."""
    leaf = logits.detach().requires_grad_()
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    losses = token_losses(leaf, *arguments(problem, at, wide))
    return torch.autograd.grad(losses.sum(), leaf)[0], losses.detach()
