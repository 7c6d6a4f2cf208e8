"""Channels with our options, and the options that servers share with them."""

from __future__ import annotations

import grpc.aio

from outrider.rpc.tls import Tls
from outrider.wire.message_bounds import MESSAGE_BYTES

Options = tuple[tuple[str, int | str], ...]

LIVENESS: Options = (
    ("grpc.keepalive_time_ms", 1_000),  # a peer that is silent for this time gets a ping
    ("grpc.keepalive_timeout_ms", 1_000),  # and counts as dead if it does not answer within this time
    ("grpc.http2.ping_timeout_ms", 1_000),  # without it a frozen peer is noticed after 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
)

_CHANNEL: Options = (
    *LIVENESS,
    # Channels to one address would share a connection and its reconnect backoff. Ours are independent.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Addresses within a cluster are reached directly; http_proxy in the environment is meant for the web.
    ("grpc.enable_http_proxy", 0),
)

# The addresses of a name are tried in an order that each client draws, so that many clients spread over many servers.
# Resolvers sort them, and all clients would take the same one.
_SPREAD: Options = (("grpc.service_config", '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}'),)


def options_of(address: str) -> Options:
    """Return the options of a channel to an address: a list of addresses is tried in its own order, those of a name are
    not."""
    return _CHANNEL if address.startswith(("ipv4:", "ipv6:")) else (*_CHANNEL, *_SPREAD)


def open_channel(address: str, tls: Tls | None = None, server_name: str = "") -> grpc.aio.Channel:
    """Open a channel to "host:port". It connects with the first call, and again whenever the connection is lost.

    With `tls` it accepts only a server whose certificate has the `server_name`, or if that is empty the address's host.
    Without, it is plaintext.

    A peer that stops answering is noticed within about two seconds. The caller closes the channel. Must be called on
    the event loop that will use it.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options_of(address))
    named: Options = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    credentials = grpc.ssl_channel_credentials(tls.ca, tls.key or None, tls.cert or None)
    return grpc.aio.secure_channel(address, credentials, options=(*options_of(address), *named))
