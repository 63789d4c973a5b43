//! Accepted gRPC connections, each in its own slot and closed on request.

use std::{
    io,
    pin::Pin,
    task::{Context as TaskContext, Poll},
    time::Duration,
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

use super::slots::Slot;

/// A connection with its peer.
pub(super) struct Connection<S, P = ()> {
    stream: S,
    peer: P,
    /// Ends the connection, regardless of pending operations.
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _slot: Slot,
}

impl<S, P> Connection<S, P> {
    pub(super) fn new(stream: S, peer: P, cut: &CancellationToken, slot: Slot) -> Self {
        Self {
            stream,
            peer,
            cut: Box::pin(cut.clone().cancelled_owned()),
            _slot: slot,
        }
    }
}

impl<S, P: Clone + Send + Sync + 'static> Connected for Connection<S, P> {
    type ConnectInfo = P;

    fn connect_info(&self) -> P {
        self.peer.clone()
    }
}

impl<S: AsyncRead + Unpin, P: Unpin> AsyncRead for Connection<S, P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Reading is always polled while a connection lives, unlike writing.
        if self.cut.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin, P: Unpin> AsyncWrite for Connection<S, P> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut TaskContext<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Pause after a failed accept. Our choice: ten attempts per second do not burden the CPU.
pub(super) const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
