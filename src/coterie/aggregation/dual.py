"""Personal and global tensors: the server's outer step, and the fusion of both (FDLoRA).

Qi et al., "FDLoRA: Personalized Federated Learning of Large Language Model via Dual LoRA Tuning",
2024 (arXiv:2406.07925).
"""

from collections.abc import Callable, Sequence

from coterie.core.tensors import Named, Tensors, weighted_sum


def nesterov(
    theta: Named, momentum: Named, gradient: Named, lr: float, decay: float
) -> tuple[Tensors, Tensors]:
    """Return parameters and momentum after a gradient step with Nesterov momentum."""
    momentum = weighted_sum([(decay, momentum), (1.0, gradient)])
    return weighted_sum([(1.0, theta), (-lr, gradient), (-lr * decay, momentum)]), momentum


def fused(weights: Sequence[float], theta_p: Named, theta_s: Named) -> Tensors:
    """Return w_1 theta_p + w_2 theta_s, A and B separately, so that the update is (w_1 B_p + w_2
    B_s)(w_1 A_p + w_2 A_s).
    """
    return weighted_sum([(float(weights[0]), theta_p), (float(weights[1]), theta_s)])


def fusion_weights(
    objective: Callable[[Sequence[float]], float], steps: int
) -> tuple[float, float]:
    """Return the (w_1, w_2) of least objective that Nelder and Mead's method evaluates, starting
    from the personal model, the global one, and their sum.
    """
    from scipy.optimize import minimize

    start = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    options = {"initial_simplex": start, "maxfev": steps, "xatol": 1e-2, "fatol": 1e-4}
    minimum = minimize(objective, start[0], method="Nelder-Mead", options=options)
    return float(minimum.x[0]), float(minimum.x[1])
