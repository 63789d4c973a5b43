//! Limits per client and in total.

use std::time::Duration;

use cotenant_units::Bytes;

/// Limits of the HTTP APIs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections open at once, of which one address may have half; the next one gets a 503 and is closed.
    pub connections_max: usize,
    /// Requests of one kind (chat, transcription, speech) in flight at once, of all clients; the next one gets a 429.
    pub requests_max: usize,
    /// Request line and headers together; more is a 431. Not below 8 KiB.
    pub head_max: Bytes,
    /// A JSON body; more is a 413.
    pub json_max: Bytes,
    /// Memory of a JSON body once it is parsed; more is a 413.
    pub tree_max: Bytes,
    /// JSON bodies and values built from them in memory at once, of all clients, half of it for one client; the next
    /// one gets a 429.
    pub requests_memory_max: Bytes,
    /// A multipart body with audio; more is a 413.
    pub audio_max: Bytes,
    /// Speech in one transcription, however it is compressed; more is a 400.
    pub audio_duration_max: Duration,
    /// Longest time for an audio file to be decoded, with the wait for others; more is a 429.
    pub decode_timeout: Duration,
    /// Audio files, and the audio decoded from them, in memory at once, all clients together; the next one gets a 429.
    pub bodies_max: Bytes,
    /// Realtime sessions at once, all clients together; the next one gets a 429.
    pub sessions_max: usize,
    /// One message of a realtime session; more ends the session.
    pub session_message_max: Bytes,
    /// Memory of the tools and other settings of a realtime session, and of one message; more is an error event.
    pub session_tree_max: Bytes,
    /// Memory of all settings of realtime sessions, half of it for one client; more is an error event.
    pub sessions_memory_max: Bytes,
    /// Memory of the items of one conversation; the oldest are deleted beyond it.
    pub session_items_max: Bytes,
    /// Audio that realtime sessions keep, all together; more is an error event.
    pub sessions_audio_max: Bytes,
    /// Time that a realtime session waits out a shortage: its clients do not retry.
    pub session_patience: Duration,
    /// How long a realtime session may be without an event before it ends.
    pub session_idle_timeout: Duration,
    /// Time that any other request waits out a shortage; at most half of the client's patience, and less than a stream
    /// waits for its admission.
    pub memory_patience: Duration,
    /// Characters of one text to be spoken.
    pub speech_chars_max: usize,
    /// Time for request line and headers, and between two requests of one connection.
    pub head_timeout: Duration,
    /// Longest wait for the next piece of a body; more is a 408.
    pub body_idle_timeout: Duration,
    /// Longest time for a whole body; more is a 408.
    pub body_timeout: Duration,
    /// How long a body may come as slowly as it likes; then less than 16 KiB/s on average is a 408.
    pub body_grace: Duration,
    /// How long a client may not read its answer before the connection is closed.
    pub write_stall_timeout: Duration,
    /// How long a stream waits for its admission before it is opened all the same and kept alive with comments.
    pub admission_timeout: Duration,
    /// Longest silence of a stream before a comment is sent; a third of the client's patience, if that is less.
    pub keepalive: Duration,
    /// How long requests in flight may continue after the listeners are closed.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Our choice: a device serves a handful of clients; each idle connection costs about 10 KiB.
            connections_max: 128,
            // Our choice: the engine generates one at a time, so a longer queue only waits for time-outs.
            requests_max: 16,
            // As common servers have it (Node 16 KiB, nginx 4 × 8 KiB).
            head_max: Bytes::from_kib(32),
            // Our choice: 32k tokens of context are about 128 KiB of text; JSON escapes may make it six times as long.
            json_max: Bytes::from_mib(1),
            // Schemas of common tools take six to seven times their text.
            tree_max: Bytes::from_mib(8),
            // Our choice: two of the largest, or some hundred common ones. This is memory of the daemon, outside of any
            // lease.
            requests_memory_max: Bytes::from_mib(40),
            // OpenAI's own limit of a file: 25 MB.
            audio_max: Bytes::from_mib(25),
            // Our choice: beyond any command or dictation; 16 kHz mono makes it 18.3 MiB.
            audio_duration_max: Duration::from_mins(10),
            // Our choice: a queue of some files; a processor decodes the longest one in seconds.
            decode_timeout: Duration::from_mins(1),
            // Our choice: one file of maximum size, its decoder, its samples, and some small files. This is memory of
            // the daemon, outside of any lease.
            bodies_max: Bytes::from_mib(72),
            // Our choice: a house has few microphones.
            sessions_max: 8,
            // Our choice, as for a body: 16 s of audio in one piece; clients send pieces of 20 to 100 ms.
            session_message_max: Bytes::from_mib(1),
            // Our choice: 300 KiB of the schemas of common tools.
            session_tree_max: Bytes::from_mib(2),
            // Our choice: two of the largest, or eight sessions with fifty common tools each.
            sessions_memory_max: Bytes::from_mib(16),
            // Our choice: beyond a context of 32k tokens.
            session_items_max: Bytes::from_kib(512),
            // Our choice: at 16 kHz it is 8.7 minutes, the sum of all speech that waits for the recogniser.
            sessions_audio_max: Bytes::from_mib(16),
            // LiveKit drops a response that has not begun after 10 s.
            session_patience: Duration::from_secs(10),
            // Our choice: above a shed (target 300 ms) and the growth after it. Ollama's clients do not retry.
            memory_patience: Duration::from_secs(4),
            // Our choice; OpenAI ends a session after an hour, used or not.
            session_idle_timeout: Duration::from_mins(10),
            // OpenAI's own limit of `input`.
            speech_chars_max: 4096,
            // Our choice, as for bodies; hyper's default of 30 s would let 128 idle connections block others longer.
            head_timeout: Duration::from_secs(15),
            // LiveKit stops waiting after 10 s without a byte; slower clients are not served.
            body_idle_timeout: Duration::from_secs(10),
            // 25 MiB in 60 s is 3.5 Mbit/s.
            body_timeout: Duration::from_mins(1),
            // As for a pause: bodies below some 100 KiB may take as long as one.
            body_grace: Duration::from_secs(10),
            // Our choice: a client that has not read for this long is gone; generation is stopped with it.
            write_stall_timeout: Duration::from_secs(30),
            // Below half of LiveKit's 10 s between two bytes, far above a shed (target 300 ms).
            admission_timeout: Duration::from_secs(4),
            // A tenth of LiveKit's 10 s between two bytes; clients that wait less get them sooner.
            keepalive: Duration::from_secs(1),
            // Below `TimeoutStopSec=45s` of the unit.
            drain_timeout: Duration::from_secs(15),
        }
    }
}
