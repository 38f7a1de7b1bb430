"""Muon for the hidden matrices, Adam for everything else; no value leaves the device, so a CUDA graph can hold a step.

Muon: Keller Jordan et al., github.com/KellerJordan/Muon (quintic Newton-Schulz iteration, Nesterov momentum 0.95).
"""

from __future__ import annotations

import torch

MUON_RATE, ADAM_RATE = 0.02, 3e-3
MOMENTUM, BETAS, EPS = 0.95, (0.9, 0.95), 1e-10
QUINTIC = (3.4445, -4.7750, 2.0315)
SMALLEST_MATRIX = 32  # thinner ones (a row per head) go to Adam


def orthogonalise(x: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """Pushes the singular values of x [n, rows, columns] towards 1; bf16 arithmetic, fp32 result."""
    a, b, c = QUINTIC
    y = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    tall = y.shape[-2] > y.shape[-1]
    if tall:
        y = y.mT
    for _ in range(rounds):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).float()


class Optimizer:
    """One step over named fp32 parameters, scaled by a device-side factor of the learning rates."""

    def __init__(self, parameters: dict[str, torch.Tensor], weight_decay: float):
        self.weight_decay = weight_decay
        by_shape: dict[torch.Size, list[torch.Tensor]] = {}
        self.others = []
        for name, p in parameters.items():
            hidden_matrix = p.dim() == 2 and min(p.shape) >= SMALLEST_MATRIX
            if hidden_matrix and "embed_tokens" not in name and "lm_head" not in name:
                by_shape.setdefault(p.shape, []).append(p)
            else:
                self.others.append(p)
        self.matrices = list(by_shape.values())
        self.momenta = [
            torch.zeros(len(group), *group[0].shape, device=group[0].device) for group in self.matrices
        ]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]
        self.steps = torch.zeros((), device=self.others[0].device)

    def state(self) -> list[torch.Tensor]:
        return [*self.momenta, *self.first, *self.second, self.steps]

    @torch.no_grad()
    def step(self, factor: torch.Tensor) -> None:
        """Updates in place from `.grad`; factor: fp32 scalar tensor on the device."""
        for group, momentum in zip(self.matrices, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            rows, columns = gradient.shape[-2:]
            update = orthogonalise(gradient.lerp_(momentum, MOMENTUM)) * max(1, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - MUON_RATE * self.weight_decay * factor)
            torch._foreach_add_(group, list((update * (-MUON_RATE * factor)).unbind()))

        self.steps += 1
        gradients = [p.grad for p in self.others]
        torch._foreach_lerp_(self.first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self.second, BETAS[1])
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - BETAS[1])
        scale = torch._foreach_div(self.second, 1 - BETAS[1] ** self.steps)
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, EPS)
        updates = torch._foreach_div(self.first, scale)
        torch._foreach_mul_(updates, -ADAM_RATE * factor / (1 - BETAS[0] ** self.steps))
        torch._foreach_add_(self.others, updates)
