//! Exit codes and their derivation from errors.
//!
//! | code | all commands | `health` |
//! |---|---|---|
//! | 0 | done | serving |
//! | 1 | failed | bad arguments |
//! | 2 | bad arguments | cannot connect |
//! | 3 | the supervisor cannot be reached | the call failed |
//! | 4 | reached, but refused or unhealthy | not serving |
//! | 5 | `drain --wait`: answers still run | |
//! | 70 | the control loop of `serve` stalled | |
//! | 78 | bad configuration, also of `reload` | |
//!
//! `health` follows `grpc_health_probe`, which it can replace.

use std::{borrow::Cow, error::Error, io, process::ExitCode, time::Duration};

use serde_json::{Map, Value, json};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use cotenant_rpc::{client::ConnectError, json::camel_case};
use cotenant_units::{TimeSpan, causes::in_one_line};

/// Done.
pub const OK: u8 = 0;
/// Failed.
pub const FAILED: u8 = 1;
/// Bad arguments; clap's code.
pub const USAGE: u8 = 2;
/// The supervisor cannot be reached.
pub const UNREACHABLE: u8 = 3;
/// The supervisor was reached, but refused or is unhealthy.
pub const REFUSED: u8 = 4;
/// The time limit of a drain has passed, and answers still run.
pub const STILL_RUNNING: u8 = 5;
/// Bad configuration (`EX_CONFIG` of sysexits.h); systemd does not restart after it.
pub const CONFIG: u8 = 78;

/// Exit codes of `health`, equal to those of `grpc_health_probe`.
pub mod health {
    /// Serving.
    pub const SERVING: u8 = 0;
    /// Bad arguments.
    pub const USAGE: u8 = 1;
    /// Cannot connect.
    pub const UNREACHABLE: u8 = 2;
    /// The call failed.
    pub const FAILED: u8 = 3;
    /// Not serving.
    pub const NOT_SERVING: u8 = 4;
}

/// Reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The supervisor cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The supervisor refused the call, or did not answer.
    #[error("{}", call_text(.0))]
    Call(#[from] Status),
    /// Another failure; the message describes it.
    #[error("{act}")]
    Failed {
        /// The failed action: `read `journal.ndjson``.
        act: String,
        /// The cause.
        source: Option<Box<dyn Error + Send + Sync>>,
        /// The remedy.
        hint: Option<String>,
        /// The exit code.
        code: u8,
    },
    /// The time limit of a drain has passed.
    #[error("drain timed out after {}; answers still running: {answers}", TimeSpan(*.within))]
    StillRunning {
        /// Number of running answers.
        answers: u32,
        /// The time limit.
        within: Duration,
    },
    /// The reader of our output is gone, which is not a fault.
    #[error("the reader closed the output")]
    OutputClosed,
}

impl CliError {
    /// Creates a failure of `act` with its cause.
    pub fn failed(act: impl Into<String>, source: impl Error + Send + Sync + 'static) -> Self {
        Self::Failed {
            act: act.into(),
            source: Some(Box::new(source)),
            hint: None,
            code: FAILED,
        }
    }

    /// Creates a failure without a cause.
    pub fn plain(act: impl Into<String>, code: u8) -> Self {
        Self::Failed {
            act: act.into(),
            source: None,
            hint: None,
            code,
        }
    }

    /// Adds a remedy, except to failures of calls and connections, which have their own.
    #[must_use]
    pub fn with_hint(mut self, remedy: impl Into<Option<String>>) -> Self {
        if let Self::Failed { hint, .. } = &mut self {
            *hint = remedy.into();
        }
        self
    }

    /// Sets the exit code, except for calls and connections, which have their own.
    #[must_use]
    pub fn with_code(mut self, exit: u8) -> Self {
        if let Self::Failed { code, .. } = &mut self {
            *code = exit;
        }
        self
    }

    /// Creates a failure of a call to another machine. If the connection broke before the alert of a refused
    /// certificate was read, that is the likely reason.
    pub(super) fn of_remote(status: Status) -> Self {
        if refused_certificate(&status).is_some() || !broken(&status) {
            return Self::Call(status);
        }
        Self::failed(
            "the supervisor closed the connection; it may refuse this client's certificate",
            status,
        )
        .with_hint(CERTIFICATE_HINT.to_owned())
        .with_code(REFUSED)
    }

    /// Returns whether the supervisor is gone, or about to exit.
    pub(super) fn is_gone(&self) -> bool {
        match self {
            Self::Call(status) if reason(status).as_deref() == Some("STOPPING") => true,
            other => other.code() == UNREACHABLE,
        }
    }

    /// Returns the exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Connect(error) if refused_certificate(error).is_some() => REFUSED,
            Self::Call(status) if refused_certificate(status).is_some() => REFUSED,
            Self::Connect(_) => UNREACHABLE,
            Self::Call(status) if !is_ours(status) => match status.code() {
                // Error of the transport: the connection broke, or timed out.
                Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => UNREACHABLE,
                Code::Internal | Code::Unknown if broken(status) => UNREACHABLE,
                Code::Internal | Code::Unknown | Code::DataLoss => FAILED,
                _ => REFUSED,
            },
            Self::Call(status) if status.code() == Code::Internal => FAILED,
            Self::Call(status) if reason(status).as_deref() == Some("CONFIG_INVALID") => CONFIG,
            Self::Call(_) => REFUSED,
            Self::Failed { code, .. } => *code,
            Self::StillRunning { .. } => STILL_RUNNING,
            Self::OutputClosed => OK,
        }
    }

    /// Returns the remedy, if known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Connect(error) if refused_certificate(error).is_none() => {
                Some(error.hint().to_owned())
            }
            Self::Connect(_) => Some(CERTIFICATE_HINT.to_owned()),
            Self::Call(status) if refused_certificate(status).is_some() => {
                Some(CERTIFICATE_HINT.to_owned())
            }
            Self::Call(status) => call_hint(status),
            Self::Failed { hint, .. } => hint.clone(),
            Self::StillRunning { .. } => Some(STILL_RUNNING_HINT.to_owned()),
            Self::OutputClosed => None,
        }
    }

    /// Renders the error, its causes and the remedy as one JSON document.
    fn to_json(&self) -> Value {
        let mut causes = Vec::new();
        let mut cause = self.source().filter(|_| !matches!(self, Self::Call(_)));
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let (reason, figures) = match self {
            Self::Call(status) => (reason(status), figures(status)),
            Self::StillRunning { answers, .. } => (None, json!({"runningAnswers": answers})),
            _ => (None, Value::Null),
        };
        json!({"error": {
            "message": self.to_string(), "causes": causes, "hint": self.hint(), "reason": reason, "figures": figures,
            "exitCode": self.code(),
        }})
    }

    /// Prints the error, its causes and the remedy on stderr, as text or as JSON, and returns the exit code.
    pub fn report(&self, as_json: bool) -> ExitCode {
        if as_json && !matches!(self, Self::OutputClosed) {
            eprintln!("{}", self.to_json());
        } else if !matches!(self, Self::OutputClosed) {
            eprintln!("error: {}", escaped(&self.to_string()));
            // A transparent error or a call error has its own text; its causes follow here.
            let mut cause = self.source();
            while let Some(error) = cause {
                if !matches!(self, Self::Call(_)) {
                    eprintln!("  caused by: {}", escaped(&error.to_string()));
                }
                cause = error.source();
            }
            if let Some(hint) = self.hint() {
                eprintln!("hint: {hint}");
            }
        }
        ExitCode::from(self.code())
    }
}

impl From<io::Error> for CliError {
    /// Converts a failure of writing the output.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::OutputClosed,
            _ => Self::failed("cannot write the output", error),
        }
    }
}

/// Returns whether the connection broke during a response, in which case the transport has a cause.
fn broken(status: &Status) -> bool {
    !is_ours(status) && status.source().is_some()
}

/// Returns why the other side refuses our certificate, if that broke the connection. With TLS 1.3, the first call shows
/// it.
fn refused_certificate(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let mut next = Some(error);
    while let Some(error) = next {
        let text = error.to_string();
        if let Some((_, alert)) = text.rsplit_once("received fatal alert: ") {
            // A status prints its source in quotation marks and brackets after the name.
            return Some(
                match alert
                    .split(|c: char| !c.is_ascii_alphanumeric())
                    .next()
                    .unwrap_or_default()
                {
                    "CertificateExpired" => "it expired",
                    "CertificateRequired" => "none was presented",
                    // Another CA with the same name: its signature does not match our key.
                    "UnknownCA" | "DecryptError" => "not signed by the CA in `grpc.tcp.client_ca`",
                    _ => "it cannot be verified",
                },
            );
        }
        next = error.source();
    }
    None
}

const STILL_RUNNING_HINT: &str = "wait again, or end the drain by `cotenant drain --off`";

const CERTIFICATE_HINT: &str =
    "present a valid certificate of the fleet's CA with --cert and --key";

fn call_text(status: &Status) -> String {
    if let Some(why) = refused_certificate(status) {
        return format!("the supervisor refuses this client's certificate: {why}");
    }
    match status.code() {
        Code::Internal | Code::Unknown | Code::Unavailable if broken(status) => {
            format!(
                "lost the connection to the supervisor during a response ({})",
                status.message()
            )
        }
        Code::Unimplemented => {
            "the supervisor does not serve this call at this endpoint".to_owned()
        }
        // Over TLS, a broken connection may leave a status without a message.
        code if status.message().is_empty() => {
            let cause = status
                .source()
                .map(|cause| format!(" ({})", in_one_line(cause)));
            format!(
                "the call failed: {}{}",
                code.description(),
                cause.unwrap_or_default()
            )
        }
        _ => status.message().to_owned(),
    }
}

/// Returns whether the status comes from the supervisor rather than the transport.
fn is_ours(status: &Status) -> bool {
    status
        .get_details_error_info()
        .is_some_and(|info| info.domain == cotenant_rpc::status::DOMAIN)
}

fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// Returns the figures of a refusal: object, values, limits. Numbers are JSON numbers; null without any.
fn figures(status: &Status) -> Value {
    let info = status.get_details_error_info().map(|info| info.metadata);
    let figure = |text: String| text.parse::<u64>().map_or(Value::String(text), Value::from);
    let mut figures: Map<String, Value> = info
        .into_iter()
        .flatten()
        .filter(|(name, _)| name != "hint")
        .map(|(name, text)| (camel_case(&name), figure(text)))
        .collect();
    let fields = status.get_details_bad_request();
    if let Some(field) = fields.and_then(|request| request.field_violations.into_iter().next()) {
        figures.insert("field".to_owned(), field.field.into());
        figures.insert("problem".to_owned(), field.description.into());
    }
    match figures.is_empty() {
        true => Value::Null,
        false => figures.into(),
    }
}

/// Returns the remedy sent by the supervisor.
fn remedy(status: &Status) -> Option<String> {
    status.get_details_error_info()?.metadata.remove("hint")
}

fn call_hint(status: &Status) -> Option<String> {
    let reason = reason(status);
    let retry = status
        .get_details_retry_info()
        .and_then(|info| info.retry_delay);
    match (reason.as_deref(), retry) {
        (Some("STOPPING"), _) => {
            Some("the supervisor is stopping; start it again first".to_owned())
        }
        (Some("BOOT_ID_CHANGED"), _) => Some("the supervisor restarted; retry".to_owned()),
        (_, Some(delay)) => Some(
            remedy(status).unwrap_or_else(|| format!("try again in {:.1} s", delay.as_secs_f64())),
        ),
        (None, _) if matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded) => {
            Some("the supervisor did not reply in time; raise --timeout".to_owned())
        }
        (None, _) if status.code() == Code::Unimplemented => Some(
            "leases are served on local sockets only; other calls may need another version of the supervisor"
                .to_owned(),
        ),
        _ => remedy(status),
    }
}

/// Escapes control characters that a terminal would interpret, since the text may come from others.
pub fn escaped(text: &str) -> Cow<'_, str> {
    // Characters that change the text direction can hide the content of a line.
    let turns = |char| matches!(char, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_obeyed = |char: char| char.is_control() && !matches!(char, '\n' | '\t') || turns(char);
    if !text.contains(is_obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if is_obeyed(char) {
            shown.extend(char.escape_unicode());
        } else {
            shown.push(char);
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cotenant_policy::denial::Denial;
    use cotenant_rpc::status::{CallError, of_denial};
    use cotenant_units::Bytes;

    #[test]
    fn a_drain_is_ended_by_the_command_that_the_hint_names() {
        let status = of_denial(
            &Denial::Draining {
                tenant: "camera".to_owned(),
                asked: Bytes::from_mib(1),
            },
            None,
        );
        let hint = CliError::Call(status).hint().unwrap();
        assert!(hint.contains("`cotenant drain --off`"), "{hint}");
    }

    #[test]
    fn a_call_that_is_not_served_says_where_it_would_be() {
        let error = CliError::Call(Status::unimplemented(""));
        assert_eq!(
            error.to_string(),
            "the supervisor does not serve this call at this endpoint"
        );
        assert!(error.hint().is_some_and(|hint| hint.contains("leases")));
        assert_eq!(error.code(), REFUSED);
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown_and_not_sent() {
        assert_eq!(escaped("a\tb\n é"), "a\tb\n é");
        assert_eq!(
            escaped("\u{1b}[2J\u{9b}1m\r\u{202e}x"),
            "\\u{1b}[2J\\u{9b}1m\\u{d}\\u{202e}x"
        );
    }

    #[test]
    fn refused_is_not_unreachable() {
        let code = |status: Status| CliError::from(status).code();
        assert_eq!(code(CallError::Stopping.into()), REFUSED);
        assert_eq!(code(Status::unavailable("tcp connect error")), UNREACHABLE);
        assert_eq!(code(Status::cancelled("Timeout expired")), UNREACHABLE);
        assert_eq!(code(Status::invalid_argument("no")), REFUSED);
        assert_eq!(code(CallError::UnfitAnswer { call: "Shed" }.into()), FAILED);
    }

    #[test]
    fn an_error_for_programs_has_the_figures_of_the_refusal() {
        let denial = Denial::ExceedsBudget {
            tenant: "7".to_owned(),
            asked: Bytes::from_gib(2),
            budget: Bytes::from_gib(1),
        };
        let error = CliError::from(of_denial(&denial, None)).to_json();
        let error = &error["error"];
        assert_eq!(error["reason"], "EXCEEDS_BUDGET");
        assert_eq!(error["exitCode"], REFUSED);
        assert_eq!(error["figures"]["askedBytes"], 2u64 << 30);
        assert_eq!(error["figures"]["budgetBytes"], 1u64 << 30);
        assert!(
            error["hint"]
                .as_str()
                .is_some_and(|hint| hint.contains("1 GiB or less"))
        );
        let invalid = CallError::InvalidField {
            field: "shed_bytes",
            value: "0".to_owned(),
            problem: "is zero".to_owned(),
        };
        let error = CliError::from(Status::from(invalid)).to_json();
        assert_eq!(error["error"]["figures"]["field"], "shed_bytes");
        let failed = CliError::plain("cannot", FAILED).to_json();
        assert_eq!(failed["error"]["figures"], Value::Null);
    }

    #[test]
    fn a_closed_pipe_is_no_fault() {
        let error = CliError::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(error.code(), OK);
    }
}
