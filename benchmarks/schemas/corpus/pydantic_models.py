"""Schemas that pydantic writes, of small models that use what it can say."""

import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar
from uuid import UUID

import pydantic
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, Json, RootModel, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

Item = TypeVar("Item")
Short = Annotated[str, Field(min_length=1, max_length=12)]
Rate = Annotated[float, Field(ge=0, le=1)]


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 10


class Point(NamedTuple):
    x: float
    y: float


class Size(TypedDict, total=False):
    width: int
    height: int


class Address(BaseModel):
    street: str
    city: Short
    postcode: str = Field(pattern=r"^\d{5}$")
    country: str = "DE"


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: int
    note: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    id: int


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    breed: str | None = None


class Bird(BaseModel):
    kind: Literal["bird", "parrot"]
    can_talk: bool = False


class Tree(BaseModel):
    label: Short
    children: list["Tree"] = []


class Expression(BaseModel):
    operator: Literal["+", "-", "*"]
    left: "Expression | float"
    right: "Expression | float"


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    next_cursor: str | None = None
    total: int = Field(ge=0)


class Order(BaseModel):
    number: UUID
    placed: datetime
    lines: list["OrderLine"] = Field(min_length=1, max_length=20)
    shipping: Address
    billing: Address | None = None
    tags: set[Short] = Field(default_factory=set)
    metadata: dict[str, str | int | bool] = {}


class OrderLine(BaseModel):
    sku: str = Field(pattern=r"^[A-Z]{3}-\d{4}$")
    count: int = Field(gt=0, lt=1000)
    price: Decimal = Field(ge=0, decimal_places=2, max_digits=8)


class Event(BaseModel):
    title: str = Field(description="A short title", examples=["Lunch"])
    start: datetime
    end: datetime | None = None
    attendees: Annotated[list[str], Field(max_length=10)] = []
    repeat: Literal["daily", "weekly"] | None = None


class Account(BaseModel):
    model_config = ConfigDict(populate_by_name=True, title="An account", json_schema_extra={"examples": [{}]})
    user_name: str = Field(alias="userName")
    age: int = Field(alias="age-in-years", ge=0)
    old_name: str | None = Field(None, deprecated=True)


# Of each type a model with one required and one optional field, so that its schema is an object's.
FIELD_TYPES: Mapping[str, Any] = {
    "text": str,
    "text-lengths": Annotated[str, Field(min_length=3, max_length=5)],
    "text-pattern": Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)*$")],
    "text-pattern-inside": Annotated[str, Field(pattern=r"[0-9]")],
    "text-pattern-lengths": Annotated[str, Field(pattern=r"^[a-z ]*$", min_length=2, max_length=9)],
    "text-lookahead": Annotated[str, Field(json_schema_extra={"pattern": r"^(?=.*\d)[a-z0-9]+$"})],
    "text-strict": Annotated[str, Field(strict=True)],
    "email": Annotated[str, WithJsonSchema({"type": "string", "format": "email"})],  # as EmailStr has it
    "url": AnyUrl,
    "path": Path,
    "uuid": UUID,
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "bytes": bytes,
    "pattern": re.Pattern[str],
    "json": Json[Any],
    "secret": pydantic.SecretStr,
    "integer": int,
    "integer-bounds": Annotated[int, Field(ge=-5, le=1000)],
    "integer-exclusive": Annotated[int, Field(gt=0, lt=10)],
    "integer-multiple": Annotated[int, Field(multiple_of=5)],
    "integer-multiple-bounds": Annotated[int, Field(multiple_of=25, ge=100, lt=1000)],
    "positive": pydantic.PositiveInt,
    "number": float,
    "number-bounds": Rate,
    "number-exclusive": Annotated[float, Field(gt=0, lt=2.5)],
    "number-multiple": Annotated[float, Field(multiple_of=0.5)],
    "decimal": Decimal,
    "boolean": bool,
    "null": None,
    "any": Any,
    "object": object,
    "literal": Literal["a", "b", 3, None, True],
    "literal-one": Literal["only"],
    "enum": Color,
    "int-enum": Level,
    "optional": str | None,
    "optional-bounds": Annotated[int, Field(ge=1)] | None,
    "union": int | str | bool,
    "union-numbers": int | float,
    "union-lists": list[int] | list[str],
    "union-models": Cat | Closed,
    "tagged": Annotated[Cat | Dog | Bird, Field(discriminator="kind")],
    "tagged-list": list[Annotated[Cat | Dog, Field(discriminator="kind")]],
    "list": list[str],
    "list-bounds": Annotated[list[int], Field(min_length=2, max_length=4)],
    "list-any": list[Any],
    "list-nested": list[list[Rate]],
    "set": set[int],
    "set-bounds": Annotated[set[Color], Field(min_length=1)],
    "frozenset": frozenset[str],
    "tuple": tuple[int, str, bool],
    "tuple-open": tuple[int, ...],
    "tuple-empty": tuple[()],
    "named-tuple": Point,
    "dict": dict[str, int],
    "dict-any": dict[str, Any],
    "dict-pattern": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "dict-bounds": Annotated[dict[str, bool], Field(min_length=1, max_length=3)],
    "dict-enum": dict[Color, int],
    "dict-literal": dict[Literal["x", "y"], float],
    "dict-integer": dict[int, str],
    "dict-uuid": dict[UUID, Address],
    "dict-nested": dict[str, dict[str, list[int]]],
    "typed-dict": Size,
    "model": Address,
    "model-closed": Closed,
    "model-open": Open,
    "model-list": list[Address],
    "model-optional": Address | None,
    "recursive": Tree,
    "recursive-union": Expression,
    "generic": Page[Address],
    "generic-text": Page[str],
}
MODELS: tuple[type[BaseModel], ...] = (Address, Closed, Open, Tree, Expression, Page[Order], Order, Event, Account)


def iter_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, kind in FIELD_TYPES.items():
        model = pydantic.create_model("Holder", value=(kind, ...), other=(Optional[kind], None))  # noqa: UP045  (None | None is no type)
        yield f"field-{name}", model.model_json_schema()
    for model in MODELS:
        yield f"model-{model.__name__}", model.model_json_schema()
    for each in (Order, Account, OrderLine):
        yield f"output-{each.__name__}", each.model_json_schema(mode="serialization")
    yield "by-name-Account", Account.model_json_schema(by_alias=False)
    yield "root-list", RootModel[list[Cat]].model_json_schema()
    yield "root-union", TypeAdapter(Annotated[Cat | Dog | Bird, Field(discriminator="kind")]).json_schema()
    yield "root-dict", TypeAdapter(dict[str, Order]).json_schema()
