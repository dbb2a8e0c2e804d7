"""The security group of a fleet in a region: whom its nodes let in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from executor.aws.clients import AwsClients
from executor.aws.launch_errors import raised_by

FIRST_PORT, LAST_PORT = 20000, 20099  # of a node's engines: it has the machine to itself
OURS = "Coral: fleet.aws.admit"  # the description of rules that Coral made, and may revoke


def group_name(fleet_id: str) -> str:
    """Of a fleet, in every region."""
    return f"coral-{fleet_id}"


def ensure_group(ec2: Any, name: str, vpc: str, group: str) -> str:
    """The id of one that admits its own members; made where there is none.

    Raises TransientError, FatalError.
    """
    found = _groups(ec2, name, group, vpc)
    if found:
        group_id = str(found[0]["GroupId"])
    else:
        with raised_by("ec2:CreateSecurityGroup", name):
            made = ec2.create_security_group(
                GroupName=group, VpcId=vpc, Description="Nodes of one Coral fleet, among themselves"
            )
            group_id = str(made["GroupId"])
    _authorize(
        ec2, name, group_id, {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    )
    return group_id


def admit(ec2: Any, name: str, group_id: str, networks: Collection[str]) -> None:
    """Let these networks reach the engines, and of those that Coral let in no others.

    Rules that somebody else made stay. Raises TransientError, FatalError.
    """
    with raised_by("ec2:DescribeSecurityGroups", name):
        found = ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"][0]
    there = [
        one
        for rule in found["IpPermissions"]
        if (rule.get("FromPort"), rule.get("ToPort")) == (FIRST_PORT, LAST_PORT)
        for one in rule["IpRanges"]
    ]
    for network in sorted(set(networks) - {one["CidrIp"] for one in there}):
        _authorize(ec2, name, group_id, _rule({"CidrIp": network, "Description": OURS}))
    for one in there:
        if one.get("Description") == OURS and one["CidrIp"] not in networks:
            with raised_by("ec2:RevokeSecurityGroupIngress", name):
                ec2.revoke_security_group_ingress(GroupId=group_id, IpPermissions=[_rule(one)])


def admit_where_it_is(
    clients: AwsClients, name: str, fleet_id: str, networks: Collection[str]
) -> None:
    """The same in a region that may have no such group yet.

    Raises TransientError, FatalError.
    """
    ec2 = clients.get("ec2", name)
    for found in _groups(ec2, name, group_name(fleet_id)):
        admit(ec2, name, str(found["GroupId"]), networks)


def _groups(ec2: Any, name: str, group: str, vpc: str | None = None) -> Sequence[Any]:
    wanted = [{"Name": "group-name", "Values": [group]}]
    if vpc is not None:
        wanted.append({"Name": "vpc-id", "Values": [vpc]})
    with raised_by("ec2:DescribeSecurityGroups", name):
        found: Sequence[Any] = ec2.describe_security_groups(Filters=wanted)["SecurityGroups"]
    return found


def _rule(network: dict[str, str]) -> dict[str, Any]:
    return {
        "IpProtocol": "tcp", "FromPort": FIRST_PORT, "ToPort": LAST_PORT, "IpRanges": [network],
    }  # fmt: skip


def _authorize(ec2: Any, name: str, group_id: str, rule: dict[str, Any]) -> None:
    action, quiet = "ec2:AuthorizeSecurityGroupIngress", ("InvalidPermission.Duplicate",)
    with raised_by(action, name, quiet=quiet):
        ec2.authorize_security_group_ingress(GroupId=group_id, IpPermissions=[rule])
