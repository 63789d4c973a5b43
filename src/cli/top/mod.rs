//! `cotenant top`: the state of the device on a terminal, as it changes.

mod screen;

use std::{
    io::{self, IsTerminal as _},
    time::{Duration, Instant},
};

use clap::Args;
use ratatui::{
    DefaultTerminal,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
};
use tonic::transport::Channel;

use self::screen::{Palette, Screen};
use super::{
    Global, Output,
    exit::{self, CliError},
    quantity,
};
use cotenant_rpc::v1::{
    GetStatusRequest, GetStatusResponse, WatchEventsRequest,
    operator_service_client::OperatorServiceClient,
};

/// Shows memory by owner, the LLM's layers and context, workers and the last events, until `q`.
///
/// Bars have colours, or with NO_COLOR the first letters of the owners.
#[derive(Debug, Args)]
pub struct Top {
    /// Refresh interval, 100 ms to 1 min.
    #[arg(long, default_value = "500ms", value_name = "DURATION", value_parser = quantity::duration)]
    interval: Duration,
}

pub(super) async fn run(global: &Global, top: &Top) -> Result<(), CliError> {
    if global.output != Output::Table || !io::stdout().is_terminal() {
        return Err(
            CliError::plain("cannot show `top`: it draws on a terminal", exit::USAGE)
                .with_hint("`cotenant status -o json` has the same figures".to_owned()),
        );
    }
    let mut client = OperatorServiceClient::new(global.connect().await?);
    let mut screen = Screen::new(look(global, &mut client).await?);
    screen.palette = Palette::of_environment();
    // Also restores the terminal if the program panics.
    let mut terminal = ratatui::try_init()?;
    let ended = follow(global, top, &mut client, &mut screen, &mut terminal).await;
    ratatui::restore();
    ended
}

async fn follow(
    global: &Global,
    top: &Top,
    client: &mut OperatorServiceClient<Channel>,
    screen: &mut Screen,
    terminal: &mut DefaultTerminal,
) -> Result<(), CliError> {
    let interval = top.interval.clamp(INTERVAL_MIN, INTERVAL_MAX);
    let mut silent_since = None;
    loop {
        match look(global, client).await {
            Ok(status) => {
                if screen.is_another_run(&status) {
                    screen.events.clear();
                }
                silent_since = None;
                screen.status = status;
                // Errors are ignored: the next look reports them.
                let _ = read_events(global, client, screen).await;
            }
            Err(_) => {
                silent_since.get_or_insert_with(Instant::now);
            }
        }
        screen.silent_for = silent_since.map(|since: Instant| since.elapsed());
        terminal.draw(|frame| {
            let area = frame.area();
            frame.render_widget(screen.text(area.width, area.height), area);
        })?;
        if quits(interval)? {
            return Ok(());
        }
    }
}

/// Waits for a key or the time of the next look; returns whether to end.
fn quits(interval: Duration) -> io::Result<bool> {
    let until = Instant::now() + interval;
    loop {
        if !event::poll(until.saturating_duration_since(Instant::now()))? {
            return Ok(false);
        }
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                let interrupted =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                if interrupted || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) {
                    return Ok(true);
                }
            }
            Event::Resize(..) => return Ok(false),
            _ => {}
        }
    }
}

async fn look(
    global: &Global,
    client: &mut OperatorServiceClient<Channel>,
) -> Result<GetStatusResponse, CliError> {
    global
        .call(client.get_status(global.request(GetStatusRequest {})))
        .await
}

/// Adds the events since the last look; at first, the last events.
async fn read_events(
    global: &Global,
    client: &mut OperatorServiceClient<Channel>,
    screen: &mut Screen,
) -> Result<(), CliError> {
    let oldest = screen.status.last_sequence.saturating_sub(EVENTS_READ);
    let after = screen
        .events
        .back()
        .map_or(oldest, |last| last.sequence.max(oldest));
    let request = WatchEventsRequest {
        after_sequence: after,
        boot_id: screen.status.boot_id.clone(),
        no_follow: true,
    };
    let mut stream = global
        .call(client.watch_events(global.request(request)))
        .await?;
    while let Some(response) = stream.message().await? {
        if let Some(entry) = response.entry {
            screen.add(entry);
        }
    }
    Ok(())
}

/// Shortest interval: a shorter one would show no more, but cost the device (our choice).
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Longest interval: a longer one would look like a hang.
const INTERVAL_MAX: Duration = Duration::from_secs(60);
/// Journal lines read at once; most are readings, which are not shown.
const EVENTS_READ: u64 = 500;
