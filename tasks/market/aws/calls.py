"""The calls of AWS, each with its action's name for errors; answers are parsed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from catalog.market.pull import Fact, QuotaRow, Score
from executor.aws.clients import AwsClients
from executor.aws.errors import explained
from tasks.market.aws import answers, requests


@dataclass(frozen=True)
class AwsCalls:
    """What is asked of AWS."""

    clients: AwsClients
    vcpus: Mapping[str, int]  # by instance type

    @property
    def types(self) -> list[str]:
        return sorted(self.vcpus)

    def regions(self) -> list[str]:
        """Regions that the account has on."""
        home = self.clients.home_region
        with explained("ec2:DescribeRegions", home):
            ec2 = self.clients.get("ec2", home)
            return answers.regions_of([ec2.describe_regions(**requests.regions_request())])

    def spot(self, region: str, since: datetime) -> list[answers.Price]:
        """Spot price changes of a region since a time."""
        ec2 = self.clients.get("ec2", region)
        with explained("ec2:DescribeAvailabilityZones", region):
            page = ec2.describe_availability_zones(**requests.zones_request())
            zones = answers.zones_of([page])
        with explained("ec2:DescribeSpotPriceHistory", region):
            pages = ec2.get_paginator("describe_spot_price_history")
            found = pages.paginate(**requests.spot_request(self.types, since))
            return answers.spot_prices(found, region, zones)

    def offerings(self, region: str) -> list[tuple[str, str]]:
        """(zone id, instance type) of a region."""
        with explained("ec2:DescribeInstanceTypeOfferings", region):
            pages = self.clients.get("ec2", region).get_paginator(
                "describe_instance_type_offerings"
            )
            return answers.zone_offerings(pages.paginate(**requests.offerings_request(self.types)))

    def facts(self, region: str) -> list[Fact]:
        """What AWS says of the types that the region has."""
        with explained("ec2:DescribeInstanceTypes", region):
            pages = self.clients.get("ec2", region).get_paginator("describe_instance_types")
            return answers.facts_of(pages.paginate(**requests.facts_request(self.types)))

    def quotas(self, region: str) -> list[QuotaRow]:
        """vCPU quotas of a region and what is used of them."""
        with explained("ec2:DescribeInstances", region):
            pages = self.clients.get("ec2", region).get_paginator("describe_instances")
            running = list(pages.paginate(**requests.instances_request()))
        with explained("servicequotas:ListServiceQuotas", region):
            quotas = self.clients.get("service-quotas", region).get_paginator("list_service_quotas")
            found = quotas.paginate(**requests.quotas_request())
            return answers.quotas_of(found, running, region, self.vcpus)

    def on_demand(self, instance_type: str) -> dict[str, float]:
        """On-demand prices of a type by region."""
        where = self.clients.pricing_region
        with explained("pricing:GetProducts", where):
            pages = self.clients.get("pricing", where).get_paginator("get_products")
            found = pages.paginate(**requests.on_demand_request(instance_type))
            return answers.on_demand_prices(found)

    def scores(
        self, asked: Sequence[str], concerns: Sequence[str], regions: Sequence[str]
    ) -> list[Score]:
        """Placement scores of some types in at most ten regions."""
        home = self.clients.home_region
        with explained("ec2:GetSpotPlacementScores", home):
            page = self.clients.get("ec2", home).get_spot_placement_scores(
                **requests.scores_request(asked, regions)
            )
            return answers.scores_of(page, asked, concerns, requests.SCORE_NODES)
