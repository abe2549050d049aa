"""Attributes of a module that a library has wrapped: what is set on the wrapper is the module's, as in plain torch."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from fsdp_core.gradients.gathered_values import other_tensor_refusal

__all__ = ["OutsideAttributes", "users_module"]


#: Attributes that both the wrapper and the user's module have.
_OF_BOTH = ("training", "forward")

#: By class of wrappers and class of the user's, what :meth:`OutsideAttributes.named_as` has returned.
_named_classes: dict[tuple[type, type], Any] = {}


class OutsideAttributes(nn.Module):
    """Passes on what is set, registered and deleted of a wrapper, unless it is the library's own.

    Libraries pass on what is read and not found, and keep what is set: ``block.scale = 2.0`` would change nothing in
    the block. A class of wrappers inherits from it and then from the library's class, and is given to a wrapper that is
    complete (``wrapper.__class__ = Wrapper.named_as(type(module))``). The module must be its attribute ``module``.
    """

    module: Any

    @classmethod
    def named_as(cls, user_class: type[nn.Module]) -> type[Self]:
        """The class of wrappers whose name is that of the user's class, for messages and reprs."""
        named: type[Self] = _named_classes.setdefault((cls, user_class), type(user_class.__name__, (cls,), {}))
        named.__qualname__ = user_class.__qualname__
        return named

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        return _create, type(self).__bases__, *reduced[2:]  # pickle finds classes by their names in files

    def __setattr__(self, name: str, value: Any) -> None:
        # first, what a library sets several times a step: its own state
        if name in self.__dict__ and name not in _OF_BOTH and not isinstance(value, nn.Module | Tensor):
            self.__dict__[name] = value
            return
        if self._is_of_module(name):
            is_plain_tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if is_plain_tensor and name in users_module(self)._parameters:  # as torch.func.functional_call() sets it
                raise other_tensor_refusal(name)
            setattr(users_module(self), name, value)
            return
        super().__setattr__(name, value)
        if name == "training":
            setattr(users_module(self), name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_of_module(name):
            delattr(users_module(self), name)
        else:
            super().__delattr__(name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        users_module(self).register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        users_module(self).register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        users_module(self).add_module(name, module)

    def _is_of_module(self, name: str) -> bool:
        if name == "forward":  # the library's calls the module's
            return True
        bases = type(self).__mro__[type(self).__mro__.index(OutsideAttributes) + 1 :]
        if name in self.__dict__ or name in self._modules or any(name in vars(base) for base in bases):
            return False
        # The library may set further private attributes of its own later.
        return not name.startswith("_") or hasattr(users_module(self), name)


def _create(wrapper_class: type[nn.Module]) -> nn.Module:
    """A wrapper without attributes, which those of a copy or a pickle are then given to."""
    return wrapper_class.__new__(wrapper_class)


def users_module(wrapper: nn.Module) -> Any:
    """The user's module in what libraries have wrapped around it, which may be several wrappers."""
    module: Any = getattr(wrapper, "module", wrapper)
    while type(module).__module__.startswith("torch_xla"):
        module = module.module
    return module
