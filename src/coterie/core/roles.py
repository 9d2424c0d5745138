"""The role of a tensor: what it is for, and so whether it may leave the client; never guessed from
its name. A module declares the roles of the parameters that it owns itself:

    class Router(nn.Module):
        def __init__(self, ...):
            self.weight = nn.Parameter(...)
            self.roles = {"weight": Role.ROUTER}
"""

from enum import StrEnum

from torch import nn

from coterie.core.errors import TensorError


class Role(StrEnum):
    """The role of a tensor in a model."""

    GENERALIST = "generalist"  # shared: averaged across clients
    SPECIALIST = "specialist"  # local
    ROUTER = "router"  # local
    EXPERT = "expert"  # a member of a server's pool
    GATE = "gate"  # chooses experts of a pool
    BACKBONE = "backbone"  # frozen, the same for all


GENERALIST, SPECIALIST, ROUTER, EXPERT, GATE, BACKBONE = Role


def by_role(module: nn.Module) -> dict[Role, dict[str, nn.Parameter]]:
    """Return the parameters of `module` by role, in the order of `named_parameters`, shared ones
    once. Raises TensorError for a trainable parameter without a role.
    """
    by_role: dict[Role, dict[str, nn.Parameter]] = {role: {} for role in Role}
    for name, parameter in module.named_parameters():
        prefix, _, leaf = name.rpartition(".")
        owner = module.get_submodule(prefix)
        declared: dict[str, Role] = getattr(owner, "roles", {})
        if leaf not in declared and parameter.requires_grad:
            problem = f"trainable parameter {name!r} of {type(owner).__name__} has no role"
            remedy = f"Declare it: self.roles = {{{leaf!r}: Role...}}, or freeze it."
            raise TensorError(problem, remedy)
        by_role[declared.get(leaf, BACKBONE)][name] = parameter
    return by_role


def tag(module: nn.Module, role: Role) -> None:
    """Give one role to all parameters of `module` and its submodules, which declare none."""
    for owner in module.modules():
        owner.roles = {name: role for name, _ in owner.named_parameters(recurse=False)}  # type: ignore[assignment]
