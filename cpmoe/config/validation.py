"""From nested dicts to strict blocks, with pydantic's errors told as problems a person can act on."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cpmoe.config.errors import UNSET, ConfigError, Problem, join_path, show, unknown_key

BlockT = TypeVar("BlockT", bound=BaseModel)

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS: dict[Any, str] = {bool: "true, false", int: "integers", float: "numbers", str: "text"}


def parse(block: type[BlockT], tree: dict, prefix: str = "") -> BlockT:
    """`tree` as a `block`; `prefix` is the path of the block itself.

    Raises ConfigError with every problem of the tree, where pydantic found more than one.
    """
    try:
        return block.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(
            problem
            for detail in error.errors()
            for problem in _problems(block, detail, prefix)
            # Follows from another problem of the same block, which is reported itself.
            if detail["type"] != "default_factory_not_called"
        ) from None


def legal_values(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """What a field of this type takes, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return legal_values(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return ", ".join(show(value) for value in arguments)
    if origin is tuple:
        each = [legal_values(argument) for argument in arguments if argument is not Ellipsis]
        return f"a list of {len(each)}: {each[0]}" if len(arguments) == len(each) else f"a list of: {each[0]}"
    if origin is list:
        return f"a list of: {legal_values(arguments[0])}"
    if origin is not None and type(None) in arguments:
        return legal_values(next(item for item in arguments if item is not type(None)), metadata)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a block with {', '.join(annotation.model_fields)}"
    bounds = [
        f"{sign} {show(getattr(bound, name))}"
        for bound in _flatten(metadata)
        for name, sign in _BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]
    kind = _KINDS.get(annotation, "")
    return f"{kind} {' and '.join(bounds)}" if kind and bounds else kind


def _flatten(metadata: tuple[Any, ...] | list[Any]) -> list[Any]:
    flat = []
    for item in metadata:
        flat += _flatten(item.metadata) if isinstance(item, FieldInfo) else [item]
    return flat


def _problems(block: type[BaseModel], detail: Any, prefix: str) -> list[Problem]:
    location, kind = detail["loc"], detail["type"]
    path = join_path(prefix, *location)
    if kind == "value_error" and isinstance(detail["ctx"]["error"], ConfigError):
        return [problem.below(path) for problem in detail["ctx"]["error"].problems]
    value = UNSET if kind == "missing" else detail["input"]
    if kind == "extra_forbidden":
        return [unknown_key(path, _block_at(block, location[:-1]).model_fields, value)]
    field = _field_at(block, location)
    if kind == "missing":
        name = join_path(prefix, *location[:-1]) or "the file"
        constraint = f"is required; {name} does not give it"
    elif kind in ("model_type", "model_attributes_type"):
        constraint = "must be a block of settings"
    elif kind in ("literal_error", "string_pattern_mismatch"):
        constraint = "is none of the legal choices"
    else:
        constraint = _sentence(detail["msg"])
    if field is None:
        return [Problem(path, constraint, value)]
    legal = field.description or legal_values(field.annotation, field.metadata)
    return [Problem(path, constraint, value, legal)]


def _sentence(message: str) -> str:
    return message.replace("Input should be", "must be").replace("String should", "must").lower()


def _block_at(block: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    for part in location:
        block = _inner_block(block.model_fields[str(part)].annotation)
    return block


def _inner_block(annotation: Any) -> type[BaseModel]:
    candidates = get_args(annotation) if get_origin(annotation) is not None else (annotation,)
    return next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))


def _field_at(block: type[BaseModel], location: tuple[int | str, ...]) -> FieldInfo | None:
    """The field that `location` names, or the one whose value has a faulty element there."""
    field: FieldInfo | None = None
    for part in location:
        field = block.model_fields[str(part)]
        try:
            block = _inner_block(field.annotation)
        except StopIteration:
            break
    return field
