//! `cotenant top`: the state of the device on a terminal, as it changes.

mod event_list;
mod memory_chart;
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

use self::screen::{Palette, Reaction, Screen};
use super::{
    Global, Output,
    exit::{self, CliError},
    quantity, why,
};
use cotenant_rpc::v1::{
    GetStatusRequest, GetStatusResponse, WatchEventsRequest,
    operator_service_client::OperatorServiceClient,
};

/// Shows memory by owner, the LLM's layers and context, workers and the last decisions, until `q`; `?` lists the keys.
///
/// Bars and the chart of the last minutes have colours, or with NO_COLOR the first letters of the owners.
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
    let mut due = Instant::now();
    loop {
        if Instant::now() >= due {
            due = Instant::now() + interval;
            if screen.is_paused {
                screen.recent.interrupt();
            } else if let Ok(status) = look(global, client).await {
                silent_since = None;
                screen.observe(status);
                // Errors are ignored: the next look reports them.
                let _ = read_events(global, client, screen).await;
            } else {
                silent_since.get_or_insert_with(Instant::now);
                screen.recent.interrupt();
            }
        }
        screen.silent_for = silent_since.map(|since: Instant| since.elapsed());
        terminal.draw(|frame| {
            let area = frame.area();
            frame.render_widget(screen.text(area.width, area.height), area);
        })?;
        match key_until(due)?.map(|key| screen.press(key)) {
            Some(Reaction::Quit) => return Ok(()),
            Some(Reaction::Explain(sequence)) => {
                let text = why::text_of(global, sequence).await;
                screen.explain(&text, terminal.size()?.width.into());
            }
            Some(Reaction::Redraw) | None => {}
        }
    }
}

/// Waits for a key or the time of the next look; a new size of the terminal also ends the wait.
fn key_until(due: Instant) -> io::Result<Option<KeyCode>> {
    while event::poll(due.saturating_duration_since(Instant::now()))? {
        match event::read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                let interrupted =
                    key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
                return Ok(Some(if interrupted {
                    KeyCode::Char('q')
                } else {
                    key.code
                }));
            }
            Event::Resize(..) => break,
            _ => {}
        }
    }
    Ok(None)
}

async fn look(
    global: &Global,
    client: &mut OperatorServiceClient<Channel>,
) -> Result<GetStatusResponse, CliError> {
    global
        .call(client.get_status(global.request(GetStatusRequest {})))
        .await
}

/// Adds the events since the last look; at first, those in the supervisor's memory.
async fn read_events(
    global: &Global,
    client: &mut OperatorServiceClient<Channel>,
    screen: &mut Screen,
) -> Result<(), CliError> {
    let request = WatchEventsRequest {
        after_sequence: screen.events.last_sequence,
        boot_id: screen.status.boot_id.clone(),
        no_follow: true,
    };
    let mut stream = global
        .call(client.watch_events(global.request(request)))
        .await?;
    while let Some(response) = stream.message().await? {
        if let Some(entry) = response.entry {
            screen.events.add(entry);
        }
    }
    Ok(())
}

/// Shortest interval: a shorter one would show no more, but cost the device (our choice).
const INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Longest interval: a longer one would look like a hang.
const INTERVAL_MAX: Duration = Duration::from_secs(60);
