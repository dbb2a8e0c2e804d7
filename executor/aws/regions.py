"""What a region needs before the first launch, made once: security group and launch template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.aws.clients import AwsClients
from executor.aws.errors import code_of
from executor.aws.launch_errors import raised_by
from executor.fleet import FatalError

IMAGE_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
)


@dataclass(frozen=True, slots=True)
class RegionSettings:
    """How instances are made, whatever their type."""

    image_id: str | None = None  # None: AWS's deep learning image with the GPU driver
    root_gib: int = 200
    instance_profile: str | None = None  # the role that its agent has


@dataclass(frozen=True, slots=True)
class Region:
    """A region that is ready."""

    name: str
    template: str  # id of the launch template
    zones: Mapping[str, str]  # names by zone id: every account has names of its own

    def zone_name(self, zone: str) -> str:
        """Raises FatalError: the account has no such zone."""
        if zone not in self.zones:
            raise FatalError(
                f"{self.name} has no zone {zone} for this account, but {', '.join(self.zones)}"
            )
        return self.zones[zone]

    @classmethod
    def prepare(
        cls, clients: AwsClients, name: str, fleet_id: str, settings: RegionSettings
    ) -> Region:
        """Find or make what is needed; may be repeated.

        Raises TransientError, FatalError.
        """
        ec2 = clients.get("ec2", name)
        with raised_by("ec2:DescribeVpcs", name):
            wanted = [{"Name": "is-default", "Values": ["true"]}]
            networks = ec2.describe_vpcs(Filters=wanted)["Vpcs"]
        if not networks:
            raise FatalError(
                f"{name} has no default network; make one (`aws ec2 create-default-vpc --region "
                f"{name}`)"
            )
        with raised_by("ec2:DescribeAvailabilityZones", name):
            zones = ec2.describe_availability_zones()["AvailabilityZones"]
        group = _security_group(ec2, name, networks[0]["VpcId"], f"coral-{fleet_id}")
        image = settings.image_id or _latest_image(clients, name)
        template = _launch_template(ec2, name, fleet_id, image, group, settings)
        return cls(name, template, {zone["ZoneId"]: zone["ZoneName"] for zone in zones})


def _latest_image(clients: AwsClients, name: str) -> str:
    with raised_by("ssm:GetParameter", name):
        found = clients.get("ssm", name).get_parameter(Name=IMAGE_PARAMETER)
        return str(found["Parameter"]["Value"])


def _security_group(ec2: Any, name: str, vpc: str, group: str) -> str:
    """One that admits its own members and nobody else."""
    with raised_by("ec2:DescribeSecurityGroups", name):
        wanted = [{"Name": "group-name", "Values": [group]}, {"Name": "vpc-id", "Values": [vpc]}]
        found = ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]
    if found:
        group_id = str(found[0]["GroupId"])
    else:
        with raised_by("ec2:CreateSecurityGroup", name):
            made = ec2.create_security_group(
                GroupName=group, VpcId=vpc, Description="Nodes of one Coral fleet, among themselves"
            )
            group_id = str(made["GroupId"])
    with raised_by(
        "ec2:AuthorizeSecurityGroupIngress", name, quiet=("InvalidPermission.Duplicate",)
    ):
        ec2.authorize_security_group_ingress(
            GroupId=group_id,
            IpPermissions=[{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}],
        )
    return group_id


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
