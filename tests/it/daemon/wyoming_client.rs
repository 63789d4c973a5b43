//! Client of the Wyoming listener that sends arbitrary frames.

use std::path::PathBuf;

use cotenant::speech::wyoming::{Event, Frame, FrameLimits, FrameReader, write_frame};
use tokio::{
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::timeout,
};

use super::installation::{Installation, budget};
use crate::support::PATIENCE;

/// `wyoming:` with a socket in the installation.
pub(super) const LISTENER: &str = "wyoming: {listen: [\"unix://{FOLDER}/wyoming.sock\"]}\n";

/// Creates an installation with a voice `tts` that only waits, and returns the socket at which a test may answer in its
/// place.
pub(super) fn with_voice_at_a_socket() -> (Installation, PathBuf) {
    let installation = Installation::new("");
    let socket = installation.path("voice.sock");
    installation.configure(&format!(
        "{}{LISTENER}workers:
  - name: tts
    role: tts
    argv: [sleep, \"1000\"]
    socket: {}
    ready: {{kind: started}}
    memory: {{steady: 4MiB}}
",
        budget(64),
        socket.display()
    ));
    (installation, socket)
}

pub(super) fn wyoming_socket(installation: &Installation) -> PathBuf {
    installation.path("wyoming.sock")
}

pub(super) struct Client {
    pub(super) reader: FrameReader<OwnedReadHalf>,
    pub(super) writer: OwnedWriteHalf,
}

impl Client {
    pub(super) async fn connect(installation: &Installation) -> Self {
        let (reader, writer) = UnixStream::connect(wyoming_socket(installation))
            .await
            .unwrap()
            .into_split();
        Self {
            reader: FrameReader::new(reader, FrameLimits::default()),
            writer,
        }
    }

    pub(super) async fn say(&mut self, event: Event) {
        write_frame(&mut self.writer, &event.into_frame())
            .await
            .unwrap();
    }

    pub(super) async fn until(&mut self, kind: &str) -> Vec<Frame> {
        let mut frames: Vec<Frame> = Vec::new();
        while frames.last().is_none_or(|frame| frame.kind != kind) {
            let frame = timeout(PATIENCE, self.reader.next())
                .await
                .expect("no answer")
                .unwrap();
            frames.push(frame.unwrap_or_else(|| panic!("closed after {frames:?}")));
        }
        frames
    }

    /// Returns the error that ends the connection.
    pub(super) async fn refusal(&mut self) -> (String, String) {
        let error = self.until("error").await.pop().unwrap();
        assert!(
            self.reader.next().await.unwrap().is_none(),
            "it is not closed"
        );
        let field = |name: &str| error.data[name].as_str().unwrap().to_owned();
        (field("code"), field("text"))
    }
}
