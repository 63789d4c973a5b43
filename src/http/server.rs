//! Connections: accept, limit, serve, close.

use std::{
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    pin::pin,
};

use axum::{Extension, Router, body::Body, extract::Request, serve::Listener};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task::JoinSet,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::{
    api::Api,
    hosts::{Peer, Reach},
    limits::Limits,
    memory::{Short, Who},
    realtime::Sessions,
    routes,
    stall::StallGuard,
};

/// A listener for clients: TCP or Unix.
pub trait ClientListener: Listener {
    /// Reachability of the address.
    fn reach(&self) -> Reach;

    /// Sets the options of a connection.
    fn prepared(io: Self::Io) -> Self::Io;

    /// The IP address of a client, if any.
    fn address(client: &Self::Addr) -> Option<IpAddr>;
}

impl ClientListener for TcpListener {
    fn reach(&self) -> Reach {
        match Self::local_addr(self) {
            Ok(address) if address.ip().to_canonical().is_loopback() => Reach::Loopback,
            _ => Reach::Network,
        }
    }

    /// Sends small pieces at once: with Nagle's algorithm a token would wait for the acknowledgement of the previous
    /// one.
    fn prepared(io: TcpStream) -> TcpStream {
        if let Err(error) = io.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
        io
    }

    fn address(client: &SocketAddr) -> Option<IpAddr> {
        Some(client.ip())
    }
}

impl ClientListener for UnixListener {
    fn reach(&self) -> Reach {
        Reach::Socket
    }

    fn prepared(io: UnixStream) -> UnixStream {
        io
    }

    fn address(_client: &Self::Addr) -> Option<IpAddr> {
        None
    }
}

/// Serves the APIs on a TCP or Unix listener until `shutdown` is cancelled.
///
/// From then on no request is accepted; requests in flight may continue for [`Limits::drain_timeout`] and are then
/// cancelled. Dropping the future drops all connections at once.
pub async fn serve<L: ClientListener>(mut listener: L, api: Api, shutdown: CancellationToken) {
    let mut connections = JoinSet::new();
    let (sessions, _ended_with_this) = Sessions::new(&shutdown);
    let router = routes::router(&api)
        .layer(Extension(listener.reach()))
        .layer(Extension(sessions.clone()));
    loop {
        let (io, peer) = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            (io, client) = listener.accept() => (L::prepared(io), L::address(&client)),
            // removes ended connections from the set
            Some(_ended) = connections.join_next(), if !connections.is_empty() => continue,
        };
        let who = Who::at(peer);
        match api.connection(&who) {
            Ok(permit) => {
                let (router, limits, shutdown) =
                    (router.clone(), api.limits().clone(), shutdown.clone());
                connections.spawn(async move {
                    connection(io, Peer(peer), router, &limits, shutdown).await;
                    drop(permit);
                });
            }
            Err(short) => {
                let limit = api.limits().connections_max;
                tracing::warn!(
                    limit,
                    ?who,
                    ?short,
                    "refused a connection: the limit is reached"
                );
                connections.spawn(refuse_connection(io, short, api.limits().clone()));
            }
        }
    }
    drop(listener);
    let drained = timeout(api.limits().drain_timeout, async {
        while connections.join_next().await.is_some() {}
        sessions.all_ended().await;
    });
    if drained.await.is_err() {
        tracing::warn!(
            open = connections.len(),
            "dropped connections that did not end in time"
        );
    }
}

async fn connection<I>(
    io: I,
    peer: Peer,
    router: Router,
    limits: &Limits,
    shutdown: CancellationToken,
) where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let who = Who::at(peer.0);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (router, who) = (router.clone(), who.clone());
        async move {
            let mut request: Request = request.map(Body::new);
            request.extensions_mut().insert(who);
            request.extensions_mut().insert(peer);
            router
                .oneshot(request)
                .await
                .map_err(|never: Infallible| never)
        }
    });
    let io = TokioIo::new(StallGuard::new(io, limits.write_stall_timeout));
    let mut served = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.head_timeout)
            .max_buf_size(limits.head_max.as_len().max(HEAD_MAX_LEAST))
            .max_headers(HEADERS_MAX)
            .serve_connection(io, service)
            .with_upgrades()
    );
    let mut closing = false;
    loop {
        tokio::select! {
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection ended in an error");
                }
                return;
            }
            () = shutdown.cancelled(), if !closing => {
                closing = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

/// Responds with the reason, and closes.
async fn refuse_connection<I>(io: I, short: Short, limits: Limits)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (open, whose) = match short {
        Short::OfAll => (limits.connections_max, ""),
        Short::OfShare => (limits.connections_max.div_ceil(2), " of one client"),
    };
    let body = format!(
        "{{\"error\":{{\"message\":\"cannot take the connection: {open} are open, which is the limit{whose}\",\
         \"type\":\"rate_limit_error\",\"param\":null,\"code\":\"too_many_connections\"}}}}",
    );
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         connection: close\r\nretry-after: 1\r\nretry-after-ms: 1000\r\nx-should-retry: true\r\n\r\n{body}",
        body.len(),
    );
    let mut io = StallGuard::new(io, limits.write_stall_timeout);
    if io.write_all(answer.as_bytes()).await.is_ok() {
        // ignored: the client may have disconnected
        let _gone = io.shutdown().await;
    }
}

/// Minimum of hyper for `max_buf_size`.
const HEAD_MAX_LEAST: usize = 8192;
/// hyper's default, made explicit.
const HEADERS_MAX: usize = 100;
