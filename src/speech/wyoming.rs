//! Wyoming protocol: a line of JSON, then data, then payload.
//!
//! ```text
//! {"type":"audio-chunk","version":"1.10.2","data_length":58,"payload_length":2048}\n     one line, under 64 KiB
//! <data_length bytes: a JSON object, merged over the header's `data`> <payload_length bytes>
//! ```
//!
//! [`frame`] splits bytes into such messages with a limit on every length, [`event`] types them, [`info`] is the
//! description of a server. Unknown fields and event types are ignored, and an explicit `null` equals a missing field,
//! because the reference implementation sends both.

pub mod event;
pub mod frame;
pub mod info;

pub use event::{AudioFormat, Event, EventError, Voice};
pub use frame::{Frame, FrameError, FrameLimits, FrameReader, write_frame};
pub use info::Info;
