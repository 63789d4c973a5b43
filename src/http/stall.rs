//! Connection with a timeout for clients that stop reading, and a lingering close.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

/// Wraps a connection.
///
/// - A write without progress for `stall` fails with `TimedOut`, which drops the answer and cancels its generation.
/// - Closing *lingers*: our FIN is sent first, then client data is read and discarded for a short time. After closing a
///   socket with unread bytes the kernel sends a reset, which the client would see instead of our 413 or 431.
pub(super) struct StallGuard<T> {
    io: T,
    stall: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    lingering: Option<Pin<Box<Sleep>>>,
}

impl<T> StallGuard<T> {
    pub(super) const fn new(io: T, stall: Duration) -> Self {
        Self {
            io,
            stall,
            stalled: None,
            lingering: None,
        }
    }
}

impl<T: AsyncWrite + Unpin> StallGuard<T> {
    /// Passes on a finished write; starts the timeout of a pending one.
    fn watched<R>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let stall = self.stall;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(stall)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the client has read nothing for {} ms", stall.as_millis()),
        )))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallGuard<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for StallGuard<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write(cx, buf);
        self.watched(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.watched(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.io).poll_flush(cx);
        self.watched(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            ready!(Pin::new(&mut self.io).poll_shutdown(cx))?;
            self.lingering = Some(Box::pin(sleep(LINGER)));
        }
        let mut scratch = [0; 4096];
        loop {
            let until = self.lingering.as_ref().map(|timer| timer.deadline());
            if until.is_none_or(|until| Instant::now() >= until) {
                return Poll::Ready(Ok(()));
            }
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut self.io).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if buf.filled().is_empty() => return Poll::Ready(Ok(())),
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_gone)) => return Poll::Ready(Ok(())),
                Poll::Pending => {
                    if let Some(timer) = self.lingering.as_mut() {
                        ready!(timer.as_mut().poll(cx));
                    }
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

/// Our choice; nginx lingers 30 s in total and 5 s for each piece, for uploads over slow links.
const LINGER: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn run<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
            .block_on(future)
    }

    #[test]
    fn a_client_that_does_not_read_is_given_up() {
        run(async {
            let (ours, _theirs) = duplex(16);
            let mut guarded = StallGuard::new(ours, Duration::from_millis(30));
            let error = guarded.write_all(&[0; 64]).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        });
    }

    #[test]
    fn a_client_that_reads_slowly_is_not() {
        run(async {
            let (ours, mut theirs) = duplex(16);
            let mut guarded = StallGuard::new(ours, Duration::from_secs(5));
            let reader = async {
                let mut got = [0; 64];
                for byte in &mut got {
                    *byte = theirs.read_u8().await.unwrap();
                    tokio::task::yield_now().await;
                }
                got
            };
            let (wrote, got) = tokio::join!(guarded.write_all(&[7; 64]), reader);
            wrote.unwrap();
            assert_eq!(got, [7; 64]);
        });
    }

    #[test]
    fn closing_reads_what_the_client_still_sends() {
        run(async {
            let (ours, mut theirs) = duplex(64);
            let mut guarded = StallGuard::new(ours, Duration::from_secs(5));
            let client = async {
                theirs.write_all(&[1; 4096]).await.unwrap();
                drop(theirs);
            };
            let (closed, ()) = tokio::join!(guarded.shutdown(), client);
            closed.unwrap();
        });
    }
}
