//! Limits per client and in total.

use std::time::Duration;

use cotenant_units::Bytes;

/// Limits of the HTTP APIs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Open connections, of which one address may have half; the next one gets a 503 and is closed.
    pub connections_max: usize,
    /// Requests of one kind (chat, transcription, speech) in flight, of all clients; the next one gets a 429.
    pub requests_max: usize,
    /// Request line and headers together; more is a 431. Not below 8 KiB.
    pub head_max: Bytes,
    /// Size of a JSON body; more is a 413.
    pub json_max: Bytes,
    /// Memory of a parsed JSON body; more is a 413.
    pub tree_max: Bytes,
    /// Memory of JSON bodies and derived values, of all clients, half of it for one client; the next one gets a 429.
    pub requests_memory_max: Bytes,
    /// Size of a multipart body with audio; more is a 413.
    pub audio_max: Bytes,
    /// Duration of the speech in one transcription; more is a 400.
    pub audio_duration_max: Duration,
    /// Longest time for decoding an audio file, including the wait for others; more is a 429.
    pub decode_timeout: Duration,
    /// Memory of audio files and the audio decoded from them, of all clients; the next one gets a 429.
    pub bodies_max: Bytes,
    /// Realtime sessions of all clients; the next one gets a 429.
    pub sessions_max: usize,
    /// Size of one message of a realtime session; more ends the session.
    pub session_message_max: Bytes,
    /// Memory of the settings of a realtime session, tools included, and of one message; more is an error event.
    pub session_tree_max: Bytes,
    /// Memory of all settings of realtime sessions, half of it for one client; more is an error event.
    pub sessions_memory_max: Bytes,
    /// Memory of the items of one conversation; beyond it the oldest are deleted.
    pub session_items_max: Bytes,
    /// Memory of the audio of all realtime sessions; more is an error event.
    pub sessions_audio_max: Bytes,
    /// How long a realtime session waits during a shortage: its clients do not retry.
    pub session_patience: Duration,
    /// How long a realtime session may be without an event before it ends.
    pub session_idle_timeout: Duration,
    /// How long any other request waits during a shortage; at most half of the client's patience, and less than
    /// `admission_timeout`.
    pub memory_patience: Duration,
    /// Characters of one text to synthesise.
    pub speech_chars_max: usize,
    /// Time for request line and headers, and between two requests of one connection.
    pub head_timeout: Duration,
    /// Longest wait for the next piece of a body; more is a 408.
    pub body_idle_timeout: Duration,
    /// Longest time for a whole body; more is a 408.
    pub body_timeout: Duration,
    /// Time without a minimum rate for a body; then less than 16 KiB/s on average is a 408.
    pub body_grace: Duration,
    /// How long a client may stop reading before the connection is closed.
    pub write_stall_timeout: Duration,
    /// Longest admission of a stream before it is opened regardless and kept alive with comments.
    pub admission_timeout: Duration,
    /// Longest silence of a stream before a comment is sent; at most a third of the client's patience.
    pub keepalive: Duration,
    /// How long requests in flight may continue after the listeners are closed.
    pub drain_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Our choice: a device serves a handful of clients; each idle connection costs about 10 KiB.
            connections_max: 128,
            // Our choice: with few answers at a time, a longer queue only waits for time-outs.
            requests_max: 16,
            // Like common servers (Node 16 KiB, nginx 4 × 8 KiB).
            head_max: Bytes::from_kib(32),
            // Our choice: 32k tokens of context are about 128 KiB of text; JSON escapes may enlarge it sixfold.
            json_max: Bytes::from_mib(1),
            // Schemas of common tools take six to seven times their text.
            tree_max: Bytes::from_mib(8),
            // Our choice: two of the largest, or some hundred common ones. Memory of the daemon, outside of any lease.
            requests_memory_max: Bytes::from_mib(40),
            // OpenAI's limit of a file: 25 MB.
            audio_max: Bytes::from_mib(25),
            // Our choice: longer than any command or dictation; 18.3 MiB as 16 kHz mono.
            audio_duration_max: Duration::from_mins(10),
            // Our choice: a queue of some files; a processor decodes the longest one in seconds.
            decode_timeout: Duration::from_mins(1),
            // Our choice: one file of maximum size, its decoder, its samples, and some small files. Memory of the
            // daemon, outside of any lease.
            bodies_max: Bytes::from_mib(72),
            // Our choice: a house has few microphones.
            sessions_max: 8,
            // Our choice, as for a body: 16 s of audio; clients send pieces of 20 to 100 ms.
            session_message_max: Bytes::from_mib(1),
            // Our choice: 300 KiB of the schemas of common tools.
            session_tree_max: Bytes::from_mib(2),
            // Our choice: two of the largest, or eight sessions with fifty common tools each.
            sessions_memory_max: Bytes::from_mib(16),
            // Our choice: exceeds a context of 32k tokens.
            session_items_max: Bytes::from_kib(512),
            // Our choice: 8.7 minutes at 16 kHz, the sum of all speech that waits for the recogniser.
            sessions_audio_max: Bytes::from_mib(16),
            // LiveKit drops a response that has not begun after 10 s.
            session_patience: Duration::from_secs(10),
            // Our choice: above a shed (target 300 ms) and the growth after it. Ollama's clients do not retry.
            memory_patience: Duration::from_secs(4),
            // Our choice; OpenAI ends a session after an hour, used or not.
            session_idle_timeout: Duration::from_mins(10),
            // OpenAI's limit of `input`.
            speech_chars_max: 4096,
            // Our choice, as for bodies; with hyper's default of 30 s, 128 idle connections would block others longer.
            head_timeout: Duration::from_secs(15),
            // LiveKit gives up after 10 s without a byte; slower clients are not served.
            body_idle_timeout: Duration::from_secs(10),
            // 25 MiB in 60 s is 3.5 Mbit/s.
            body_timeout: Duration::from_mins(1),
            // As for a pause: bodies below some 100 KiB may take as long as a pause.
            body_grace: Duration::from_secs(10),
            // Our choice: a client that has not read for this long is assumed dead; its generation is cancelled.
            write_stall_timeout: Duration::from_secs(30),
            // Below half of LiveKit's 10 s between two bytes, far above a shed (target 300 ms).
            admission_timeout: Duration::from_secs(4),
            // A tenth of LiveKit's 10 s between two bytes; less for less patient clients.
            keepalive: Duration::from_secs(1),
            // Below `TimeoutStopSec=45s` of the unit.
            drain_timeout: Duration::from_secs(15),
        }
    }
}
