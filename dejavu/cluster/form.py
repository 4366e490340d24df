"""The schema of cluster.yaml: its keys and their values, for the loader and for editors.

What depends on the whole file, such as a link to an unknown group, the loader checks.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator

from dejavu.cluster.records import DTYPES, Kind
from dejavu.foundation import units

MAX_DEVICES = 100_000
MAX_LISTED_HOSTS = 10_000
MAX_GROUPS = 200
MAX_CARDS = 64
LEAST_PRICE, MOST_PRICE = 1e-3, 1e9  # of a node an hour, in any currency

_NUMBER = r"^\s*\+?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]{1,2})?\s*"


def _text_schema(unit: str, *examples: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"{_NUMBER}{unit}\\s*$", "examples": list(examples)})


def _between(parse: Callable[[str], float], least: str, most: str) -> BeforeValidator:
    """Validate that a quantity is between these two, inclusive: anything outside is a typing mistake."""

    def parsed(text: str) -> float:
        value = parse(text)
        if not parse(least) <= value <= parse(most):
            raise ValueError(f"{text!r} is out of range; wanted {least} to {most}")
        return value

    return BeforeValidator(parsed)


# The ranges cover everything from a microcontroller to announced hardware, with three orders of magnitude to spare.
_Bytes = Annotated[
    int, _between(units.parse_bytes, "1 KiB", "1 PiB"), _text_schema("([kKMGTPE]|[KMGTP]i)?B", "141 GiB")
]
_BytesPerSecond = Annotated[
    float,
    _between(units.parse_bytes_per_second, "1 kB/s", "1 PB/s"),
    _text_schema("(([kKMGTPE]|[KMGTP]i)?(B|bit)/s|[kKMGTPE]bps)", "300 GB/s", "25 Gbit/s"),
]
_Seconds = Annotated[
    float, _between(units.parse_seconds, "0 s", "10 s"), _text_schema("([numµμ]?s|min|h)", "5 us", "1.5 ms")
]
_FlopsPerSecond = Annotated[
    float,
    _between(units.parse_flops_per_second, "1 MFLOP/s", "1 EFLOP/s"),
    _text_schema("[kKMGTPE]?FLOP(/s|S)", "312 TFLOP/s"),
]


def _price(text: str) -> tuple[float, str]:
    amount, currency = units.parse_price(text)
    if not LEAST_PRICE <= amount <= MOST_PRICE:
        raise ValueError(f"{text!r} is out of range; wanted {LEAST_PRICE:g} to {MOST_PRICE:,.0f} {currency}/hour")
    return amount, currency


_Price = Annotated[tuple[float, str], BeforeValidator(_price), _text_schema("[A-Z]{3}/hour", "2.10 USD/hour")]


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LinkForm(_Form):
    """A link, one way."""

    bandwidth: _BytesPerSecond = Field(description="in one direction, such as 300 GB/s or 25 Gbit/s")
    latency: _Seconds | None = Field(default=None, description="such as 5 us; a documented default if absent")


class HostMemoryForm(_Form):
    """A node's own memory, in which its devices may keep activations, and the optimizer its state."""

    size: _Bytes = Field(description="of a node, for all its devices together, such as 1 TiB")
    bandwidth: _BytesPerSecond = Field(description="between one device and this memory, one way, while all copy")
    update_bandwidth: _BytesPerSecond | None = Field(
        default=None,
        description="of the node's processors while they update weights, for all its devices together; as much as its "
        "devices copy if absent",
    )


class NvmeForm(_Form):
    """A node's own disks, on which the optimizer may keep its state."""

    size: _Bytes = Field(description="of a node, for all its devices together, such as 7 TB")
    read: _BytesPerSecond = Field(description="of a node, for all its devices together, such as 6 GB/s")
    write: _BytesPerSecond = Field(description="likewise")
    folder: str | None = Field(
        default=None, pattern="^/", description="on them, an absolute path on every such node; plans only if absent"
    )


class PairForm(LinkForm):
    """The link between the nodes of two groups; of a group with itself: between two of its nodes."""

    between: list[str] = Field(min_length=2, max_length=2, description="the names of two groups")


class LinksForm(_Form):
    """The links between nodes."""

    default: LinkForm | None = Field(default=None, description="for each pair that is not listed")
    pairs: list[PairForm] = []


class CountForm(_Form):
    """Devices of one type in a node."""

    type: str = Field(description="a name of the catalogue (dejavu/devices.csv) or of `devices:`")
    count: int = Field(default=1, ge=1, le=MAX_DEVICES, description="per node")


_Devices = Annotated[
    Annotated[list[CountForm], Field(min_length=1), Tag("<list>")] | Annotated[CountForm, Tag("<one>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<one>"),
]


class NodesForm(_Form):
    """A group of equal nodes: a count, or the names of the hosts."""

    name: str
    count: int | None = Field(
        default=None, ge=1, le=MAX_DEVICES, description="nodes; 1 if neither count nor hosts is given"
    )
    hosts: list[str] | None = Field(default=None, min_length=1)
    devices: _Devices = Field(description="of one node")
    link: LinkForm | None = Field(
        default=None, description="between devices inside a node; from the catalogue's interconnect if absent"
    )
    price: _Price | None = Field(default=None, description="of one node, such as 2.10 USD/hour")
    host_memory: HostMemoryForm | None = Field(
        default=None, description="where its devices may keep activations and optimizer state; nowhere if absent"
    )
    nvme: NvmeForm | None = Field(default=None, description="where the optimizer may keep its state; nowhere if absent")
    cards: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CARDS,
        description="network cards of a node, which its devices share equally, 1 if absent; a link between nodes has "
        "one card's bandwidth",
    )

    @model_validator(mode="after")
    def _count_or_hosts(self) -> "NodesForm":
        if self.count is not None and self.hosts is not None:
            raise ValueError("both count and hosts are given; wanted one of them")
        return self

    @model_validator(mode="after")
    def _nvme_beside_memory(self) -> "NodesForm":
        if self.nvme is not None and self.host_memory is None:
            raise ValueError("nvme is given without host_memory, through which all of it goes")
        return self


class DeviceForm(_Form):
    """A device that the catalogue does not have."""

    kind: Kind
    memory: _Bytes
    bandwidth: _BytesPerSecond = Field(description="of its memory")
    float32: _FlopsPerSecond | None = None
    tfloat32: _FlopsPerSecond | None = None
    float16: _FlopsPerSecond | None = None
    bfloat16: _FlopsPerSecond | None = None
    multiprocessors: int | None = Field(default=None, ge=1, le=1_000_000)
    cache: _Bytes | None = None
    board_watts: float | None = Field(
        default=None, ge=1, le=100_000, description="the most that the board draws; no limit to its clock if absent"
    )
    process_nanometres: int | None = Field(default=None, ge=1, le=100, description="how it is made, such as 7")
    architecture: str | None = Field(
        default=None, min_length=1, max_length=40, description="the maker's name of its generation, such as Hopper"
    )

    @model_validator(mode="after")
    def _computes(self) -> "DeviceForm":
        if not self.peaks():
            raise ValueError(f"no peak is given; wanted one of {', '.join(DTYPES)}, such as `float32: 20 TFLOP/s`")
        return self

    def peaks(self) -> dict[str, float]:
        return {dtype: peak for dtype in DTYPES if (peak := getattr(self, dtype)) is not None}


_Nodes = Annotated[
    Annotated[list[NodesForm], Field(min_length=1, max_length=MAX_GROUPS), Tag("<list>")]
    | Annotated[Literal["auto"], Tag("<auto>")],
    Discriminator(
        lambda value: "<list>" if isinstance(value, list) else "<auto>" if value == "auto" else None,
        custom_error_type="nodes",
        custom_error_message="a list of node groups, or `auto` for this machine",
    ),
]


class ClusterForm(_Form):
    """The cluster to plan for."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="cluster.yaml")

    name: str | None = Field(default=None, min_length=1, max_length=100)
    nodes: _Nodes
    links: LinksForm | None = None
    devices: dict[str, DeviceForm] = {}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of cluster.yaml, for editors."""
    schema: dict[str, Any] = _without_null(ClusterForm.model_json_schema())
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _without_null(schema: Any) -> Any:
    """Disallow null in the schema: a key without a value, as `count: ~`, is more likely a mistake."""
    if isinstance(schema, list):
        return [_without_null(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _without_null(value) for key, value in schema.items() if not (key == "default" and value is None)}
    members = [member for member in kept.pop("anyOf", ()) if member != {"type": "null"}]
    if len(members) == 1:
        return {**members[0], **kept}
    return {**kept, "anyOf": members} if members else kept
