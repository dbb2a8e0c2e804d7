"""What nodes on EC2 are made of: what a scenario says under `fleet.aws` with `kind: aws`.

Source: docs/operations.md, Nodes of a cloud.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, PositiveInt, field_validator

from planner.errors import ScenarioError
from planner.strict import Strict

CLOUD = "aws"
LEAST_ROOT_GIB = 8


class AwsSite(Strict):
    """Of all regions; the regions are those of the scenario's domains."""

    controller: str | None = None  # host by which nodes reach it; None: as it says itself
    images: dict[str, str] = Field(default_factory=dict)  # AMI by region; else AWS's
    root_gib: Annotated[int, Field(ge=LEAST_ROOT_GIB)] = 200  # of the volume with the weights
    instance_profile: str | None = None  # a role that may read the weights
    networks: dict[str, str] = Field(default_factory=dict)  # VPC by region; else the default one
    admit: tuple[str, ...] = ()  # networks of gateway and controller: they reach the engines
    endpoint_url: str | None = None  # of all services of AWS; None: AWS's own
    install: tuple[str, ...] = ()  # what pip installs as Coral; none: this version by its name
    engine: tuple[str, ...] = ("vllm==0.32.0", "nixl==1.5.1")  # what pip installs beside it
    root: str = "/opt/coral"  # folder on the nodes
    metadata: str = "http://169.254.169.254"  # where nodes hear of their end
    expire_hours: PositiveInt = 24  # said by a tag, for whoever cleans up without Coral

    @field_validator("admit")
    @classmethod
    def _networks(cls, found: tuple[str, ...]) -> tuple[str, ...]:
        for text in found:
            if ipaddress.IPv4Network(text).prefixlen == 0:
                raise ValueError(f"{text} would let everybody reach the engines; name a network")
        return found

    @field_validator("root")
    @classmethod
    def _whole(cls, found: str) -> str:
        if not found.startswith("/") or found == "/":
            raise ValueError("root must be a folder by its whole path")
        return found


def region_in(domain: str) -> str | None:
    """'aws:us-east-1' -> 'us-east-1'; None: a domain of another cloud."""
    cloud, _, region = domain.partition(":")
    return region if cloud == CLOUD and region else None


def region_of(domain: str, where: str) -> str:
    """The same. Raises ScenarioError: a domain of another cloud."""
    region = region_in(domain)
    if region is None:
        raise ScenarioError(
            f"{where}: an aws fleet rents in domains such as aws:us-east-1, not in {domain}; leave "
            "it out of domains, or use another fleet.kind"
        )
    return region
