"""The settings of a server, `make serve`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lib.config.section import Natural, NonNegative, Positive, Seconds, Section


class ServeSettings(Section):
    """A finished run behind an OpenAI-compatible gateway, `make serve`; docs/serving.md tells the whole story."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on; any but a loopback address needs serve.keys."""
    port: Annotated[Natural, Field(le=65535)] = 8080
    """Port of the gateway; 0 takes a free one."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = None
    """What clients call the model; by default the run's name. No other name is served."""
    keys: str | None = None
    """File of API keys, as `python -m lib.server --make-key NAME` adds them: hashes only. Read again on SIGHUP."""
    hostfile: str | None = None
    """Host file: one backend on each host, over ssh, with the model and the run at the same places as here."""
    backends: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s?#]+$")], ...] = ()
    """Servers of the same model and adapter that already run, e.g. [http://10.0.0.2:8081]; by default one is started
    here."""
    fuse: bool = False
    """Serve the model with the adapter fused into it, kept in RUN/fused-...: faster, at the price of a second copy on
    disk."""
    concurrency: Positive = 32
    """Requests that one backend decodes at once; more wait in the gateway."""
    max_queue: Natural = 256
    """Requests that may wait; what comes beyond them is refused (429), of the key that has most of them."""
    max_connections: Positive = 1024
    """Open connections, from the first packet on. One more takes the place of the longest idle one; where none is idle
    it is closed."""
    max_connections_per_address: Positive | None = None
    """Of these, connections of one address (of IPv6: of one /64 network); by default half of serve.max_connections."""
    max_body_bytes: Positive = 1_000_000
    """Largest body of a request."""
    max_prompt_tokens: Positive = 8192
    """Longest prompt, in tokens as the model sees them: through its chat template, with its tools."""
    max_tokens: Positive = 2048
    """Longest completion, and what a request gets that names no limit."""
    read_seconds: Seconds = 10.0
    """Longest time that a client may take to send its headers, and again its body."""
    write_seconds: Seconds = 30.0
    """Longest time that a client may leave the answer unread."""
    idle_seconds: Seconds = 75.0
    """Longest time that a connection may stay open between two requests; longer than clients keep theirs, or they may
    send into one that is just being closed."""
    queue_seconds: Seconds = 60.0
    """Longest wait for a backend."""
    stall_seconds: Seconds = 120.0
    """Longest silence of a backend in the middle of an answer; then it is taken out and looked at."""
    request_seconds: Seconds = 600.0
    """Longest time that a request may occupy a backend."""
    start_seconds: Seconds = 600.0
    """Longest time that a backend may take to load the model."""
    drain_seconds: NonNegative = 2.0
    """After SIGTERM: how long new requests are still taken while /readyz already says no. What was taken is always
    finished."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may call from a browser, e.g. [https://chat.example.org]; by default none."""
    tls_certificate: str | None = None
    """PEM file of a certificate chain, for https; needs serve.tls_key."""
    tls_key: str | None = None
    """PEM file of its private key."""
    feedback: str | None = None
    """File that gets a line for every completion that a client labels (POST /v1/feedback): what was asked, what was
    answered, true or false, as train.loss=kto takes it. By default there is no such address, and nothing is kept."""
    feedback_seconds: Seconds = 3600.0
    """How long after its end a completion may be labelled."""
    feedback_bytes: Positive = 64_000_000
    """Most memory for completions that may still be labelled; the oldest of the key go first that has most."""
    feedback_per_minute: Positive = 120
    """Most labels of one key in a minute; what comes beyond them is refused (429)."""
    feedback_bytes_per_minute: Positive = 4_000_000
    """Most bytes that one key's labels add to the file in a minute, beyond a first one; more is refused (429)."""

    @property
    def most_of_address(self) -> int:
        """Connections of one address."""
        return self.max_connections_per_address or max(1, self.max_connections // 2)
