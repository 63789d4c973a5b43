//! Process that decodes one audio file under kernel limits.
//!
//! Client audio is decoded by libraries that cannot be interrupted, and whose memory depends on the file: 300 bytes of
//! a Vorbis header may request gigabytes. A separate process that ends with its client contains them.
//!
//! ```text
//! daemon ── limit, length, file ──► decoder (RLIMIT_DATA, RLIMIT_CPU) ── samples … done, or an error ──► daemon
//! ```

use std::{
    fs,
    io::{self, BufWriter, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream as BlockingStream},
    path::PathBuf,
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    time::Duration,
};

use nix::sys::resource::{Resource, setrlimit};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::UnixStream,
    sync::Semaphore,
};

use super::{
    audio::{ASR_RATE_HZ, AudioError, MonoAudio},
    decode::decode_for_asr,
};
use cotenant_units::{Bytes, millis};

/// Decodes files in sequence. Clones share one place.
#[derive(Clone, Debug)]
pub struct Decoder {
    program: PathBuf,
    place: Arc<Semaphore>,
}

impl Decoder {
    /// A decoder that runs `program` with the argument [`DECODER_VERB`].
    pub fn new(program: PathBuf) -> Self {
        Self {
            program,
            place: Arc::new(Semaphore::new(DECODERS_MAX)),
        }
    }

    /// Reads an audio file as 16 kHz mono. `room` is called with the total bytes of samples, and returns whether memory
    /// is available for them. Dropping the returned future ends the process.
    ///
    /// # Errors
    /// If the file cannot be read within the limits, memory is exhausted, or the process fails.
    pub async fn decode(
        &self,
        file: &[u8],
        limit: Duration,
        mut room: impl FnMut(usize) -> bool + Send,
    ) -> Result<MonoAudio, DecodeError> {
        // The semaphore is never closed.
        let _place = self.place.acquire().await.ok();
        let (ours, theirs) = BlockingStream::pair()?;
        let _running = Running(
            Command::new(&self.program)
                .arg(DECODER_VERB)
                .env_clear()
                .current_dir("/")
                .stdin(Stdio::from(OwnedFd::from(theirs.try_clone()?)))
                .stdout(Stdio::from(OwnedFd::from(theirs)))
                .stderr(Stdio::null())
                .spawn()?,
        );
        ours.set_nonblocking(true)?;
        let mut stream = BufReader::new(UnixStream::from_std(ours)?);
        let millis = millis(limit);
        let length = u64::try_from(file.len()).unwrap_or(u64::MAX);
        let header = [millis.to_le_bytes(), length.to_le_bytes()].concat();
        for part in [&header, file] {
            stream.write_all(part).await.map_err(ended)?;
        }
        let mut samples = Vec::new();
        loop {
            let kind = stream.read_u8().await.map_err(ended)?;
            let mut body = vec![0; usize::from(stream.read_u16_le().await.map_err(ended)?)];
            stream.read_exact(&mut body).await.map_err(ended)?;
            match kind {
                SAMPLES => {
                    if !room(2 * samples.len() + body.len()) {
                        return Err(DecodeError::NoRoom);
                    }
                    if samples.capacity() < samples.len() + body.len() / 2 {
                        // Doubling could allocate twice the bytes admitted by `room`.
                        samples.reserve_exact(SAMPLES_STEP);
                    }
                    samples.extend(
                        body.chunks_exact(2)
                            .filter_map(|pair| Some(i16::from_le_bytes(*pair.first_chunk()?))),
                    );
                }
                DONE => return Ok(MonoAudio::new(ASR_RATE_HZ, samples)),
                _ => {
                    return Err(DecodeError::Audio(
                        String::from_utf8_lossy(&body).into_owned(),
                    ));
                }
            }
        }
    }
}

/// Reason why there are no samples.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Message about a faulty file.
    #[error("{0}")]
    Audio(String),
    /// The process ended prematurely.
    #[error("it is damaged, or decoding takes more than {BYTES_MAX} of memory or {} s of a processor", CPU_MAX.as_secs())]
    Bounds,
    /// No memory is available for the samples.
    #[error("there is no memory for the samples")]
    NoRoom,
    /// The process could not be started or used.
    #[error("the decoder process cannot be used")]
    Io(#[from] io::Error),
}

/// The error for a prematurely ended stream.
fn ended(error: io::Error) -> DecodeError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset => DecodeError::Bounds,
        _ => DecodeError::Io(error),
    }
}

/// A process that is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The process has no state to save.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs as the decoder process; its owner uses standard input and output.
pub fn serve_stdin() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn serve() -> io::Result<()> {
    // When killed at these limits, the process writes no core; under memory shortage it is killed first.
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    setrlimit(Resource::RLIMIT_CPU, CPU_MAX.as_secs(), CPU_MAX.as_secs())?;
    let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    let mut input = io::stdin().lock();
    let mut number = || -> io::Result<u64> {
        let mut bytes = [0; 8];
        input.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let (limit, length) = (Duration::from_millis(number()?), number()?);
    let data_max = data_bytes()?
        .saturating_add(length)
        .saturating_add(BYTES_MAX.get());
    setrlimit(Resource::RLIMIT_DATA, data_max, data_max)?;
    let mut file = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    input.read_exact(&mut file)?;

    let mut output = BufWriter::with_capacity(1 << 16, io::stdout().lock());
    let done = decode_for_asr(&file, limit, &mut |samples| {
        samples.chunks(SAMPLES_PER_FRAME).try_for_each(|samples| {
            let bytes: Vec<u8> = samples
                .iter()
                .flat_map(|sample| sample.to_le_bytes())
                .collect();
            write_frame(&mut output, SAMPLES, &bytes)
        })
    });
    match done {
        Ok(()) => write_frame(&mut output, DONE, &[])?,
        Err(AudioError::Handed(gone)) => return Err(gone),
        Err(error) => write_frame(&mut output, FAILED, in_words(&error).as_bytes())?,
    }
    output.flush()
}

fn write_frame(output: &mut impl Write, kind: u8, body: &[u8]) -> io::Result<()> {
    let body = body.get(..usize::from(u16::MAX)).unwrap_or(body);
    output.write_all(&[kind])?;
    output.write_all(&u16::try_from(body.len()).unwrap_or(u16::MAX).to_le_bytes())?;
    output.write_all(body)
}

/// An error with its causes, on one line.
fn in_words(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", in_words(cause)),
        None => error.to_string(),
    }
}

/// Current memory counted against `RLIMIT_DATA`.
fn data_bytes() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib << 10)
        .ok_or_else(|| io::Error::other("the kernel reports no amount of data"))
}

/// The argument that selects this mode of the program.
pub const DECODER_VERB: &str = "audio-decoder";

/// Allocation limit of decoding besides the file. Our choice: five times the use of ten-minute files in all formats.
pub const BYTES_MAX: Bytes = Bytes::from_mib(24);

/// Processor time of decoding. Our choice: ten minutes of any format take a tenth of it on a slow board.
const CPU_MAX: Duration = Duration::from_secs(30);

/// Files decoded concurrently: each takes seconds at most, and a whole processor.
const DECODERS_MAX: usize = 1;

/// Growth step of the sample buffer.
const SAMPLES_STEP: usize = 1 << 19;

/// First byte of a frame: samples, the end, or an error message.
const SAMPLES: u8 = b's';
const DONE: u8 = b'd';
const FAILED: u8 = b'e';

/// Samples of one frame; its length has 16 bits.
const SAMPLES_PER_FRAME: usize = 1 << 14;

/// Our choice: killed before workers and the daemon.
const OOM_SCORE: &str = "800";
