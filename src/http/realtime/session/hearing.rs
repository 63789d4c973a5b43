//! Recognition of the user's speech in a session, after the end of a turn or ahead of it.

use std::sync::Arc;

use futures_util::FutureExt as _;
use serde_json::{Map, json};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::{
    super::{
        super::{
            api::Kind,
            backend::{RequestMeta, TranscribeRequest},
            fault::Fault,
            transcription::{Hearing, PIECES_AHEAD, Recognised},
        },
        input::Utterance,
        output::End,
        run::{Run, patiently},
    },
    state::{Ahead, Early, Heard, Said, Session},
};
use cotenant_conversation::{refusal::Refusal, refusals::at_limit};
use cotenant_speech::audio::{ASR_RATE_HZ, MonoAudio};
use cotenant_telemetry::Span;

impl Session {
    /// Starts recognition of a turn that has probably ended.
    pub(super) fn begin_early(&mut self, closing: bool) {
        if closing || self.hearing.is_some() || !self.said.is_empty() {
            return;
        }
        let Some(utterance) = self.input.copied() else {
            return;
        };
        let span = self.turn_begins();
        self.early = match self.heard_by_recogniser(&utterance, &span, true) {
            Ok((hearing, place)) => Some(Early {
                hearing,
                is_heard: false,
                unwanted: self.api.backends().status.answers().unwanted(),
                answer: None,
                span,
                memory: utterance.memory,
                place,
            }),
            Err(_refused) => None,
        };
    }

    /// Starts the answer to a turn that has probably ended. It is sent only once the turn has ended.
    pub(super) fn heard_early(&mut self, text: Option<&str>) {
        let Some(mut early) = self.early.take() else {
            return;
        };
        let Some(text) = text else {
            return;
        };
        early.is_heard = true;
        if self.responds() && self.active.is_none() && !text.trim().is_empty() {
            let meta = RequestMeta {
                early: true,
                ..self.part_meta(&early.span)
            };
            let settings = self.settings.of_response(Map::new()).ok();
            let asked = settings
                .and_then(|settings| self.asked(meta, &settings, (true, &[]), Some(text)).ok());
            early.answer = asked.map(|(request, voice)| Ahead {
                run: Run::begin(&self.api, request.clone(), voice.clone()),
                request,
                voice,
            });
        }
        self.early = Some(early);
    }

    pub(super) fn committed(&mut self, utterance: Utterance, early: Option<Early>, respond: bool) {
        let id = self
            .turn
            .take()
            .unwrap_or_else(|| self.api.fresh_id("item_"));
        let item = json!({
            "id": id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
            "content": [{"type": "input_audio", "transcript": null}],
        });
        // its id is new
        let _inserted = self.items.insert(None, &id, item.clone());
        self.outbox.event(
            "input_audio_buffer.committed",
            json!({"previous_item_id": self.items.previous(&id), "item_id": id}),
        );
        self.announced(&id, &item);
        let said = Said {
            item: id,
            utterance,
            early,
            respond,
        };
        if self.said.len() < SAID_MAX {
            self.said.push_back(said);
            self.hear();
        } else {
            let what = "the queue of utterances in this session";
            let refusal = at_limit(HEAR, what, SAID_MAX);
            self.unheard(&said.item, said.respond, &refusal);
        }
    }

    /// Starts recognition of the oldest utterance.
    pub(super) fn hear(&mut self) {
        while self.hearing.is_none()
            && let Some(said) = self.said.pop_front()
        {
            let duration = said.utterance.duration();
            let (span, heard, ahead, memory, again) = match said.early {
                Some(Early {
                    hearing,
                    answer,
                    span,
                    memory,
                    place,
                    ..
                }) => (
                    span,
                    Ok((hearing, place)),
                    answer,
                    memory,
                    Some(said.utterance),
                ),
                None => {
                    let span = self.turn_begins();
                    let heard = self.heard_by_recogniser(&said.utterance, &span, false);
                    (span, heard, None, said.utterance.memory, None)
                }
            };
            match heard {
                Ok((hearing, place)) => {
                    self.hearing = Some(Heard {
                        item: said.item,
                        respond: said.respond,
                        duration,
                        hearing,
                        ahead,
                        again,
                        span,
                        _memory: memory,
                        _place: place,
                    });
                }
                Err(refusal) => self.unheard(&said.item, said.respond, &refusal),
            }
        }
        self.start();
    }

    fn heard_by_recogniser(
        &self,
        utterance: &Utterance,
        span: &Span,
        early: bool,
    ) -> Result<(Hearing, OwnedSemaphorePermit), Refusal> {
        let backend = self.api.backends().speech(HEAR, "speech recogniser")?;
        let place = self.api.place(Kind::Transcription)?;
        let how = |key: &str| {
            let value = self.settings.transcription.as_ref()?.get(key)?.as_str()?;
            (!value.is_empty()).then(|| value.to_owned())
        };
        let (pieces, heard) = mpsc::channel(PIECES_AHEAD);
        let request = TranscribeRequest {
            meta: RequestMeta {
                early,
                ..self.part_meta(span)
            },
            model: how("model").unwrap_or_default(),
            audio: Arc::new(MonoAudio::new(ASR_RATE_HZ, utterance.samples.clone())),
            language: how("language"),
            prompt: how("prompt"),
            pieces: Some(pieces),
        };
        let api = self.api.clone();
        let work = async move {
            if early {
                return backend.transcribe(request).await;
            }
            patiently(&api, || backend.transcribe(request.clone())).await
        }
        .boxed();
        Ok((Hearing::of(work, heard), place))
    }

    pub(super) fn recognised(&mut self, recognised: Option<Recognised>, closing: bool) {
        let wanted = self.settings.transcription.is_some();
        let Some(heard) = &self.hearing else {
            return;
        };
        let (item, respond) = (heard.item.clone(), heard.respond);
        match recognised {
            Some(Recognised::Piece(delta)) => {
                if wanted {
                    self.outbox.event(
                        "conversation.item.input_audio_transcription.delta",
                        json!({"item_id": item, "content_index": 0, "delta": delta}),
                    );
                }
                return;
            }
            Some(Recognised::Whole(text)) => {
                self.items.transcribed(&item, &text);
                if wanted {
                    let seconds = heard.duration.as_secs_f64();
                    self.outbox.event(
                        "conversation.item.input_audio_transcription.completed",
                        json!({
                            "item_id": item, "content_index": 0, "transcript": text,
                            "usage": {"type": "duration", "seconds": seconds},
                        }),
                    );
                }
                let heard = self.hearing.take();
                (self.turn_span, self.ahead) =
                    heard.map_or((None, None), |heard| (Some(heard.span), heard.ahead));
                if let Some(span) = &self.turn_span {
                    span.pause();
                }
                // noise without words needs no response
                if respond
                    && !text.trim().is_empty()
                    && self.active.is_none()
                    && let Err(fault) = self.announce(Map::new(), closing)
                {
                    self.outbox.error(&fault, None);
                }
            }
            Some(Recognised::Failed(refusal)) => {
                match self.hearing.take().and_then(|heard| heard.again) {
                    Some(utterance) => self.said.push_front(Said {
                        item,
                        utterance,
                        early: None,
                        respond,
                    }),
                    None => self.unheard(&item, respond, &refusal),
                }
            }
            None => self.hearing = None,
        }
        self.hear();
    }

    /// Reports a failed recognition by the event expected by the client.
    pub(super) fn unheard(&mut self, item: &str, respond: bool, refusal: &Refusal) {
        let fault = Fault::from(refusal.clone());
        if self.settings.transcription.is_some() {
            let error = fault.to_json().get("error").cloned();
            self.outbox.event(
                "conversation.item.input_audio_transcription.failed",
                json!({"item_id": item, "content_index": 0, "error": error}),
            );
        }
        if respond
            && self.active.is_none()
            && let Err(fault) = self.announce(Map::new(), false)
        {
            self.outbox.error(&fault, None);
        }
        if self
            .active
            .as_ref()
            .is_some_and(|active| active.run.is_none())
        {
            self.end(End::Failed(fault));
        } else if self.settings.transcription.is_none() {
            self.outbox.error(&fault, None);
        }
    }
}

impl Early {
    /// The text of the turn; `None` if recognition failed or the early work is to be cancelled. Cancel-safe.
    pub(super) async fn heard(&mut self) -> Option<String> {
        tokio::select! {
            biased;
            () = &mut self.unwanted => None,
            text = self.hearing.whole(), if !self.is_heard => text.map(str::to_owned),
        }
    }
}

/// Completes "cannot".
const HEAR: &str = "transcribe the utterance";
/// Utterances that may wait for the recogniser. Our choice.
const SAID_MAX: usize = 8;
