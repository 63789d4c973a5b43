//! Server side of a stream, with a cut-off for clients that do not read.
//!
//! Between source and client, only a few responses here and one HTTP/2 window are buffered. If both are full and
//! nothing is read for the server's patience, the source is dropped and its slot freed; a client that reads again finds
//! the reason at the end.

use std::{
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use tokio::sync::{mpsc, mpsc::error::SendTimeoutError};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{slots::Slot, status::CallError};

/// Output of one stream.
#[derive(Debug)]
pub(super) struct Outlet<T> {
    responses: mpsc::Sender<T>,
    /// Status after the last response.
    last: Arc<OnceLock<Status>>,
    patience: Duration,
}

/// Reason why a response was not sent.
#[derive(Debug)]
pub(super) enum Unsent {
    Gone,
    Stalled(CallError),
}

impl<T> Clone for Outlet<T> {
    fn clone(&self) -> Self {
        Self {
            responses: self.responses.clone(),
            last: Arc::clone(&self.last),
            patience: self.patience,
        }
    }
}

impl<T: Send + 'static> Outlet<T> {
    /// An outlet with a queue of `capacity` responses, and the stream for its client.
    pub(super) fn new(
        capacity: usize,
        patience: Duration,
    ) -> (Self, BoxStream<'static, Result<T, Status>>) {
        let (sender, receiver) = mpsc::channel(capacity);
        let last = Arc::<OnceLock<Status>>::default();
        let outlet = Self {
            responses: sender,
            last: Arc::clone(&last),
            patience,
        };
        let error = stream::once(async move { last.get().cloned() })
            .filter_map(async |error| error.map(Err));
        (
            outlet,
            ReceiverStream::new(receiver).map(Ok).chain(error).boxed(),
        )
    }

    /// Sends a response; waits for space until the patience is over.
    pub(super) async fn send(&self, response: T) -> Result<(), Unsent> {
        let patience = self.patience;
        match self.responses.send_timeout(response, patience).await {
            Ok(()) => Ok(()),
            Err(SendTimeoutError::Closed(_)) => Err(Unsent::Gone),
            Err(SendTimeoutError::Timeout(_)) => {
                Err(Unsent::Stalled(CallError::ReaderStalled { patience }))
            }
        }
    }

    /// Waits until the client disconnects.
    pub(super) async fn closed(&self) {
        self.responses.closed().await;
    }

    /// Ends the stream with `error` after everything sent. The first error counts.
    pub(super) fn fail(&self, error: Status) {
        let _ = self.last.set(error);
    }
}

/// Forwards `source` to a client, one response ahead. `slot` is freed when the source ends.
pub(super) fn pump<T: Send + 'static>(
    source: impl Stream<Item = Result<T, Status>> + Send + 'static,
    slot: Slot,
    patience: Duration,
) -> BoxStream<'static, Result<T, Status>> {
    let (outlet, responses) = Outlet::new(1, patience);
    tokio::spawn(async move {
        let _slot = slot;
        let mut source = pin!(source);
        loop {
            let next = tokio::select! {
                next = source.next() => next,
                () = outlet.closed() => return,
            };
            match next {
                Some(Ok(response)) => match outlet.send(response).await {
                    Ok(()) => {}
                    Err(Unsent::Gone) => return,
                    Err(Unsent::Stalled(error)) => return outlet.fail(error.into()),
                },
                Some(Err(error)) => return outlet.fail(error),
                None => return,
            }
        }
    });
    responses
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[tokio::test]
    async fn what_was_sent_comes_before_the_error_and_nothing_after_it() {
        let (outlet, mut stream) = Outlet::new(3, Duration::from_secs(60));
        outlet.send(1).await.unwrap();
        outlet.send(2).await.unwrap();
        outlet.fail(Status::aborted("first"));
        outlet.fail(Status::aborted("second"));
        drop(outlet);
        assert_eq!(stream.next().await.unwrap().unwrap(), 1);
        assert_eq!(stream.next().await.unwrap().unwrap(), 2);
        assert_eq!(stream.next().await.unwrap().unwrap_err().message(), "first");
        assert!(stream.next().await.is_none());
    }

    #[tokio::test]
    async fn a_source_ends_when_its_client_stops_reading_and_its_slot_is_free() {
        let slots = super::super::slots::Slots::new(super::super::Bounds {
            per_process: 1,
            per_user: 1,
            total: 1,
        });
        let slot = slots.open((1, None)).unwrap();
        let mut read = pump(stream::iter(1..).map(Ok), slot, Duration::from_millis(50));
        let again = loop {
            match slots.open((1, None)) {
                Ok(slot) => break slot,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        drop(again);
        assert_eq!(read.next().await.unwrap().unwrap(), 1);
        let error = read.next().await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::Aborted);
        assert!(read.next().await.is_none());
    }
}
