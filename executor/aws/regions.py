"""What a region needs before the first launch, made once: security group and launch template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executor.aws.clients import AwsClients
from executor.aws.errors import code_of
from executor.aws.groups import admit, ensure_group, group_name
from executor.aws.launch_errors import raised_by
from executor.fleet import FatalError, NoCapacityError

IMAGE_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """How instances are made, whatever their type."""

    image_id: str | None = None  # None: AWS's deep learning image with the GPU driver
    root_gib: int = 200
    instance_profile: str | None = None  # the role that its agent has
    images: Mapping[str, str] = field(default_factory=dict)  # by region, before image_id
    networks: Mapping[str, str] = field(default_factory=dict)  # VPC by region; else the default one
    admit: tuple[str, ...] = ()  # networks whose machines may reach the nodes' engines

    def image_of(self, region: str) -> str | None:
        return self.images.get(region, self.image_id)


@dataclass(frozen=True, slots=True)
class Region:
    """A region that is ready."""

    name: str
    template: str  # id of the launch template
    zones: Mapping[str, str]  # names by zone id: every account has names of its own
    subnets: Mapping[str, str] | None = None  # by zone id; None: the default network's own choice

    def zone_name(self, zone: str) -> str:
        """Raises FatalError: the account has no such zone."""
        if zone not in self.zones:
            raise FatalError(
                f"{self.name} has no zone {zone} for this account, but {', '.join(self.zones)}"
            )
        return self.zones[zone]

    def place(self, zone: str | None) -> Mapping[str, Any]:
        """Arguments of a launch in a zone, or in any.

        Raises FatalError: the account has no such zone. NoCapacityError: the network has no subnet
        there.
        """
        name = None if zone is None else self.zone_name(zone)
        if self.subnets is None:
            return {} if name is None else {"Placement": {"AvailabilityZone": name}}
        if zone is None:
            return {"SubnetId": min(self.subnets.values())}
        if zone not in self.subnets:
            raise NoCapacityError(f"the network in {self.name} has no subnet in zone {zone}")
        return {"SubnetId": self.subnets[zone]}

    @classmethod
    def prepare(
        cls, clients: AwsClients, name: str, fleet_id: str, settings: RegionSettings
    ) -> Region:
        """Find or make what is needed; may be repeated.

        Raises TransientError, FatalError.
        """
        ec2 = clients.get("ec2", name)
        named = settings.networks.get(name)
        with raised_by("ec2:DescribeVpcs", name):
            default = {"Name": "is-default", "Values": ["true"]}
            wanted = default if named is None else {"Name": "vpc-id", "Values": [named]}
            networks = ec2.describe_vpcs(Filters=[wanted])["Vpcs"]
        if not networks and named is not None:
            raise FatalError(f"{name} has no network {named}; correct fleet.aws.networks")
        if not networks:
            raise FatalError(
                f"{name} has no default network; make one (`aws ec2 create-default-vpc --region "
                f"{name}`), or name one in fleet.aws.networks"
            )
        subnets = None if named is None else _subnets(ec2, name, named)
        with raised_by("ec2:DescribeAvailabilityZones", name):
            zones = ec2.describe_availability_zones()["AvailabilityZones"]
        network = networks[0]["VpcId"]
        group = ensure_group(ec2, name, network, group_name(fleet_id))
        admit(ec2, name, group, settings.admit)
        image = settings.image_of(name) or _latest_image(clients, name)
        template = _launch_template(ec2, name, fleet_id, image, group, settings)
        return cls(name, template, {zone["ZoneId"]: zone["ZoneName"] for zone in zones}, subnets)


def _latest_image(clients: AwsClients, name: str) -> str:
    with raised_by("ssm:GetParameter", name):
        found = clients.get("ssm", name).get_parameter(Name=IMAGE_PARAMETER)
        return str(found["Parameter"]["Value"])


def _subnets(ec2: Any, name: str, network: str) -> dict[str, str]:
    """By zone id, the one with the most free addresses."""
    with raised_by("ec2:DescribeSubnets", name):
        wanted = [{"Name": "vpc-id", "Values": [network]}]
        found = ec2.describe_subnets(Filters=wanted)["Subnets"]
    if not found:
        raise FatalError(f"network {network} in {name} has no subnet; make one per zone")
    found.sort(key=lambda one: (one["AvailableIpAddressCount"], one["SubnetId"]))
    return {one["AvailabilityZoneId"]: str(one["SubnetId"]) for one in found}


def _launch_template(
    ec2: Any, name: str, fleet_id: str, image: str, group: str, settings: RegionSettings
) -> str:
    """Named after its content, so that another content is another template."""
    content: dict[str, Any] = {
        "ImageId": image,
        "SecurityGroupIds": [group],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled"},  # IMDSv2 alone
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/sda1",
                "Ebs": {
                    "VolumeSize": settings.root_gib, "VolumeType": "gp3",
                    "DeleteOnTermination": True, "Encrypted": True,
                },
            }
        ],
    }  # fmt: skip
    if settings.instance_profile is not None:
        content["IamInstanceProfile"] = {"Name": settings.instance_profile}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    template = f"coral-{fleet_id}-{digest}"
    with raised_by("ec2:CreateLaunchTemplate", name):
        try:
            made = ec2.create_launch_template(
                LaunchTemplateName=template, LaunchTemplateData=content
            )
            return str(made["LaunchTemplate"]["LaunchTemplateId"])
        except Exception as error:
            if code_of(error) != "InvalidLaunchTemplateName.AlreadyExistsException":
                raise
    with raised_by("ec2:DescribeLaunchTemplates", name):
        found = ec2.describe_launch_templates(LaunchTemplateNames=[template])
        return str(found["LaunchTemplates"][0]["LaunchTemplateId"])
