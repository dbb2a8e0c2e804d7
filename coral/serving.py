"""Commands of the machines that serve: agent, controller, gateway. No Prefect, no DuckDB."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from coral.options import Json
from coral.output import print_json

Home = Annotated[
    str | None,
    typer.Option("--home", help="Coral's home folder. [CORAL_HOME or ~/.local/share/coral]"),
]


gateway_app = typer.Typer()
keys_app = typer.Typer(no_args_is_help=True)


def add_commands(app: typer.Typer) -> None:
    """Register them."""
    app.command()(agent)
    app.command()(controller)
    gateway_app.add_typer(keys_app, name="keys", help="Keys that requests need.")
    app.add_typer(gateway_app, name="gateway")


def agent(
    lease: Annotated[str, typer.Option(help="Id of this node's lease.")],
    controller: Annotated[str, typer.Option(help="Where the controller listens: tcp://host:port.")],
    controller_key: Annotated[str, typer.Option(help="The controller's public key.")],
    key_file: Annotated[
        Path, typer.Option(help="File with this lease's keys; made first where the node enrols.")
    ],
    folder: Annotated[Path, typer.Option(help="Folder of the processes' logs.")],
    first_lease: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for the controller at first.")
    ] = 120.0,
    metadata: Annotated[
        str | None,
        typer.Option(
            help="Where the cloud says that it takes the node; on EC2 http://169.254.169.254."
        ),
    ] = None,
    enrol: Annotated[
        str | None,
        typer.Option(
            help="Where a node that makes its keys itself asks to be let in: tcp://host:port."
        ),
    ] = None,
    ticket: Annotated[str, typer.Option(help="Of the lease, to enrol with.")] = "",
    began: Annotated[
        float | None, typer.Option(help="When the node's user data began; seconds since 1970.")
    ] = None,
    installed: Annotated[float | None, typer.Option(help="When all was installed.")] = None,
) -> None:
    """Run this node: start, watch and stop what the controller says; end when it is gone."""
    from executor.control.agent import Agent, AgentSettings
    from executor.control.join import Joining, join
    from executor.control.keys import load_or_make, read_keys
    from executor.logs import log_to_stderr

    log_to_stderr()
    keys = read_keys(key_file) if enrol is None else load_or_make(key_file)
    if enrol is not None:
        join(Joining(enrol, controller_key, lease, ticket, began, installed), keys)
    running = Agent(
        AgentSettings(lease, controller, controller_key, keys, folder, first_lease, metadata)
    )
    _on_signals(lambda: running.stop("asked to end"))
    typer.echo(running.run(), err=True)


def controller(
    home: Home = None,
    address: Annotated[
        str,
        typer.Option(
            help="Where agents connect, and nodes of a cloud enrol one port above; * takes free "
            "ports."
        ),
    ] = "tcp://127.0.0.1:*",
    lease: Annotated[
        float,
        typer.Option(min=5.0, help="Seconds that nodes go on when this controller is gone."),
    ] = 30.0,
    metrics: Annotated[
        str | None, typer.Option(help="Also answer Prometheus at this host:port. [not]")
    ] = None,
) -> None:
    """Bring nodes to what is deployed, and tell gateways which replicas answer."""
    from executor.daemon import Daemon
    from executor.home import HomeFiles, resolve_home
    from executor.lease_store import SqliteLeaseStore
    from executor.logs import log_to_stderr
    from executor.metrics import ControllerCollector, serve_metrics

    ended = []
    _on_signals(lambda: ended.append(True))
    folder = resolve_home(home)
    with Daemon(folder, address, lease) as daemon, ExitStack() as stack:
        log_to_stderr()
        if metrics is not None:
            leases = SqliteLeaseStore(HomeFiles(folder).leases)
            stop = serve_metrics(metrics, ControllerCollector(daemon, leases.all))
            stack.callback(stop)
        found = daemon.controller
        typer.echo(f"controller at {found.address}, nodes enrol at {found.enrol_address}", err=True)
        while not ended:
            daemon.step()


@gateway_app.callback(invoke_without_command=True)
def gateway(
    context: typer.Context,
    home: Home = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    certificate: Annotated[
        Path | None, typer.Option(help="TLS: file of the certificate and those above it (PEM).")
    ] = None,
    certificate_key: Annotated[
        Path | None, typer.Option(help="TLS: file of its private key (PEM).")
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=1.0, help="Seconds that a request may take in all.")
    ] = 3600.0,
    per_engine: Annotated[
        int, typer.Option(min=1, help="Requests in flight at one engine; beyond that 429.")
    ] = 1024,
    largest_mib: Annotated[float, typer.Option(min=0.001, help="MiB of a request.")] = 4.0,
    controller: Annotated[
        str | None,
        typer.Option(help="Where the controller is: tcp://host:port. [as the home says]"),
    ] = None,
    notice: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds from SIGTERM on in which /ready says 503 and all is still taken."
        ),
    ] = 0.0,
    drain: Annotated[
        int, typer.Option(min=0, help="Seconds for requests under way after that.")
    ] = 60,
) -> None:
    """Answer OpenAI-compatible requests with the replicas that are ready."""
    if context.invoked_subcommand is not None:
        context.obj = home
        return
    from executor.gateway.app import Limits, make_app
    from executor.gateway.process import serve
    from executor.home import resolve_home

    folder = resolve_home(home)
    folder.mkdir(parents=True, exist_ok=True)
    limits = Limits(deadline, body_bytes=int(largest_mib * 2**20), in_flight=per_engine)
    app = make_app(folder, limits, controller=controller)
    tls = _tls(certificate, certificate_key)
    refuse_taken(host, port)
    from executor.logs import log_to_stderr

    log_to_stderr()
    typer.echo(f"gateway at {'https' if tls else 'http'}://{host}:{port}", err=True)
    _on_signals(lambda: None)  # the server has handlers of its own, and gives these back
    serve(app, notice, host=host, port=port, timeout_graceful_shutdown=drain, **tls)


def _tls(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """The server's options for TLS.

    Raises CertificateError: half of a pair, or files that are none.
    """
    import ssl

    from executor.gateway.app import CertificateError

    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        raise CertificateError("TLS needs both --certificate and --certificate-key")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise CertificateError(
            f"{certificate} and {key} are no certificate and its key in PEM without a password "
            f"({error.strerror or error if isinstance(error, OSError) else error})"
        ) from error
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


@keys_app.command("add")
def add_key(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is; several may have one name.")],
    in_flight: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at once. [no limit]")
    ] = None,
    per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests a minute. [no limit]")
    ] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a key and show it, this once. From the first on requests need one."""
    from executor.gateway.keys import add_key

    key, secret = add_key(_key_file(context, home), name, in_flight, per_minute)
    if as_json:
        print_json({**key.model_dump(mode="json", exclude={"sha256"}), "key": secret})
    else:
        typer.echo(f"{secret}\nKey {key.id} of {name}. It is shown this once; clients give it as "
                   "their API key.")  # fmt: skip


@keys_app.command("list")
def list_keys(context: typer.Context, home: Home = None, as_json: Json = False) -> None:
    """Ids, names and limits of all keys; not the keys."""
    from executor.gateway.keys import read_api_keys

    found = read_api_keys(_key_file(context, home))
    if as_json:
        keys = found.keys if found else ()
        listed = [key.model_dump(mode="json", exclude={"sha256"}) for key in keys]
        print_json({"open": found is None, "keys": listed})
    elif found is None:
        typer.echo(
            "No keys: the gateway lets everybody in. Make one with `coral gateway keys add`."
        )
    elif not found.keys:
        typer.echo("No keys: the gateway lets nobody in. Make one with `coral gateway keys add`.")
    else:
        for key in found.keys:
            flight = f", {key.in_flight} in flight" if key.in_flight else ""
            minute = f", {key.per_minute} a minute" if key.per_minute else ""
            typer.echo(f"{key.id}  {key.name}, made {key.made_at:%Y-%m-%d}{flight}{minute}")


@keys_app.command("revoke")
def revoke_key(
    context: typer.Context,
    key: Annotated[str, typer.Argument(help="Its id, as `coral gateway keys list` has it.")],
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Refuse a key from now on."""
    from executor.gateway.keys import revoke_key

    gone = revoke_key(_key_file(context, home), key)
    if as_json:
        print_json({"id": gone.id, "name": gone.name, "revoked": True})
    else:
        typer.echo(f"Key {gone.id} of {gone.name} is revoked.")


def _key_file(context: typer.Context, home: str | None) -> Path:
    """Of the home named after the verb, or before it."""
    from executor.home import HomeFiles, resolve_home

    return HomeFiles(resolve_home(home or context.obj)).gateway_keys


def refuse_taken(host: str, port: int) -> None:
    """Say it before the server's own log does.

    Raises PortTakenError: something listens there already, or the address is not this machine's.
    """
    import socket

    from executor.gateway.app import PortTakenError

    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            raise PortTakenError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another --port"
            ) from error


def _on_signals(stop: Callable[[], None]) -> None:
    """End in order, not at once as flows do."""
    signal.set_wakeup_fd(-1)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop())
