"""AWS's errors, each as one sentence that names the thing and the way out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from planner.errors import CoralError, InputError

SKEW = timedelta(minutes=4)  # AWS refuses signatures five minutes off


class BotoMissingError(InputError):
    """boto3 is not installed."""


class CredentialsError(InputError):
    """No credentials, expired ones, or such that AWS does not know."""


class DeniedError(InputError):
    """The credentials may not do this."""


class ClockSkewError(InputError):
    """This machine's clock is off."""


class RegionOffError(InputError):
    """The account has not switched the region on."""


class ThrottledError(CoralError):
    """Too many requests, also after pauses."""


class UnreachableError(CoralError):
    """No answer."""


class AwsAnswerError(CoralError):
    """An answer that is not what was asked for."""


EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
UNKNOWN = {
    "InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch",
    "InvalidAccessKeyId", "MissingAuthenticationToken", "IncompleteSignature",
    "InvalidSignatureException",
}  # fmt: skip
DENIED = {"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "NotAuthorized"}
OFF = {"AuthFailure", "OptInRequired", "RegionDisabledException"}
THROTTLED = {
    "RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException",
    "SlowDown", "BandwidthLimitExceeded",
}  # fmt: skip
SKEWED = {"RequestTimeTooSkewed", "RequestInTheFuture"}
LOG_IN = "log in again (`aws sso login`, or new keys)"


@contextmanager
def explained(action: str, region: str) -> Iterator[None]:
    """Raise what goes wrong inside as one of this module's errors.

    `action` is as IAM names it: 'ec2:DescribeRegions'.
    """
    try:
        yield
    except CoralError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise AwsAnswerError(
            f"{action} in {region}: the answer is not as expected ({type(error).__name__}: "
            f"{error}); a newer Coral may know it"
        ) from error
    except Exception as error:
        raise explain(error, action, region, datetime.now(UTC)) from error


def explain(error: Exception, action: str, region: str, now: datetime) -> CoralError:
    """The named error of what boto3 raised."""
    name = type(error).__name__
    if name in {"NoCredentialsError", "CredentialRetrievalError"}:
        return CredentialsError(
            "no AWS credentials: run `aws configure`, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY; or ask no AWS (market.sources, fleet.kind)"
        )
    if name == "PartialCredentialsError":
        return CredentialsError(f"the AWS credentials are not complete ({error}); set both keys")
    if name == "ProfileNotFound":
        return CredentialsError(
            f"{error}; set AWS_PROFILE to one that `aws configure list-profiles` names"
        )
    if "SSO" in name or name == "TokenRetrievalError":
        return CredentialsError(f"the AWS log-in has ended ({error}); {LOG_IN}")
    if name in {"ReadTimeoutError", "ConnectTimeoutError", "EndpointConnectionError"}:
        return UnreachableError(f"{action} in {region}: no answer from AWS ({error})")
    response: dict[str, Any] = getattr(error, "response", {}) or {}
    code = code_of(error)
    if not code:
        return AwsAnswerError(f"{action} in {region}: {name}: {_line(error)}")
    return _of_code(code, response, action, region, now)


def code_of(error: Exception) -> str:
    """'' where it is no answer of AWS."""
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _of_code(
    code: str, response: dict[str, Any], action: str, region: str, now: datetime
) -> CoralError:
    said = f"{code}: {str(response['Error'].get('Message', '')).strip() or 'no message'}"
    skew = clock_skew(response, now)
    if code in SKEWED or (code in EXPIRED | UNKNOWN | OFF and skew is not None):
        off = f" by {abs(skew.total_seconds()) / 60:.0f} minutes" if skew is not None else ""
        return ClockSkewError(
            f"this machine's clock is off{off} and AWS refuses its requests ({said}); set it "
            "(`timedatectl set-ntp true`)"
        )
    if code in EXPIRED:
        return CredentialsError(f"the AWS credentials have expired ({said}); {LOG_IN}")
    if code in UNKNOWN:
        return CredentialsError(
            f"AWS does not know these credentials ({said}); check AWS_PROFILE and the keys"
        )
    if code in DENIED:
        return DeniedError(
            f"AWS denies {action} in {region}; add to the policy: {statement(action)}"
        )
    if code in OFF:
        return RegionOffError(
            f"region {region} is not switched on for this account ({said}); enable it in the "
            "account settings, or leave it out (market.aws_regions, domains)"
        )
    if code in THROTTLED:
        return ThrottledError(
            f"AWS throttles {action} in {region} ({said}); ask less often, or of fewer regions "
            "(market.aws_regions)"
        )
    return AwsAnswerError(f"{action} in {region}: {said}")


def statement(action: str) -> str:
    """The line that a policy lacks."""
    return json.dumps({"Effect": "Allow", "Action": action, "Resource": "*"})


def clock_skew(response: dict[str, Any], now: datetime) -> timedelta | None:
    """How far this clock is from AWS's, where that is why it refuses."""
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        theirs = parsedate_to_datetime(str(headers["date"]))
    except (KeyError, TypeError, ValueError):
        return None
    if theirs.tzinfo is None:
        return None
    skew = now - theirs
    return skew if abs(skew) > SKEW else None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
