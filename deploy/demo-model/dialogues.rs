//! The dialogues the demo model learns: what a person says to a voice assistant at home, and what it answers.
//!
//! Everything is drawn from templates by a seeded generator, so the same seed gives the same text on every machine. A slot
//! combination ("attic fan on") belongs to one [`Split`] always. Whatever the speech recogniser's grammar can say is always
//! in [`Split::Train`]; of the combinations beyond it one in eight is held out.

use std::fmt::Debug;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::phrases::{
    ASKED, COLOURS, DEVICES, DEVICES_MORE, DOORS, DOORS_MORE, EXPLAIN, FRIENDS, GENRES, HEROES,
    LAMPS_MORE, LONG_STORY, MUSIC_CONTROL, NUMBERS, PLACES, QUESTION_STARTS, REMINDERS, ROOMS,
    ROOMS_MORE, SMALL_TALK, STORIES, STORY_PLAIN, SYSTEM, THANKS, TIMER_CONTROL, WEATHER,
    WISH_THINGS, WISH_VERBS,
};

/// Which part of the data a slot combination belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// Never trained on.
    HeldOut,
    /// Trained on.
    Train,
}

/// One request and its answer.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// What the person says.
    pub(crate) user: String,
    /// What the assistant answers.
    pub(crate) assistant: String,
}

/// A conversation.
#[derive(Clone, Debug)]
pub(crate) struct Dialogue {
    /// The system message, if any.
    pub(crate) system: Option<&'static str>,
    /// At least one.
    pub(crate) turns: Vec<Turn>,
}

impl Dialogue {
    /// The text in ChatML, exactly as the chat template renders it.
    pub(crate) fn chatml(&self) -> String {
        let mut text = String::new();
        if let Some(system) = self.system {
            text += &format!("<|im_start|>system\n{system}<|im_end|>\n");
        }
        for turn in &self.turns {
            text += &format!(
                "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n",
                turn.user, turn.assistant
            );
        }
        text
    }
}

/// Draws dialogues, endlessly.
pub(crate) struct Generator {
    rng: ChaCha8Rng,
    split: Split,
}

impl Generator {
    /// A generator whose dialogues depend on nothing but `seed` and `split`.
    pub(crate) fn new(seed: u64, split: Split) -> Self {
        Self {
            rng: ChaCha8Rng::seed_from_u64(seed),
            split,
        }
    }

    /// The next dialogue: mostly one to four turns, at most twenty.
    pub(crate) fn dialogue(&mut self) -> Dialogue {
        let system = self.chance(30).then(|| self.pick(SYSTEM));
        let wanted = match self.below(100) {
            0..50 => 1,
            50..75 => 2,
            75..88 => 3,
            88..94 => 4,
            94..97 => 6,
            _ => self.range(8, 20) as usize,
        };
        let mut turns = Vec::with_capacity(wanted);
        let mut about = Topic::Nothing;
        let mut unseen = false;
        while turns.len() < wanted {
            let mut exchange = match about {
                Topic::Nothing => self.opening(),
                _ if self.chance(55) => self.follow_up(&about),
                _ => self.opening(),
            };
            unseen |= exchange.unseen;
            // a held-out dialogue must hold a combination that was never trained on
            if self.split == Split::HeldOut && turns.len() + 1 == wanted && !unseen {
                exchange = loop {
                    let exchange = self.opening();
                    if exchange.unseen {
                        break exchange;
                    }
                };
                unseen = true;
            }
            about = exchange.about;
            turns.push(Turn {
                user: self.spoken(&exchange.user),
                assistant: exchange.assistant,
            });
        }
        Dialogue { system, turns }
    }

    /// The user's words as a keyboard, a good or a plain recogniser would deliver them.
    fn spoken(&mut self, text: &str) -> String {
        let question = QUESTION_STARTS.iter().any(|start| text.starts_with(start));
        match self.below(100) {
            0..52 => plain(text),
            52..80 => format!("{}{}", capital(text), if question { '?' } else { '.' }),
            80..88 => capital(&plain(text)),
            88..92 => plain(&text.replacen("the ", "", 1)),
            92..97 => format!(
                "{} {}",
                self.pick(&["hey", "uh", "um", "okay", "well", "hello"]),
                plain(text)
            ),
            _ => {
                // a word said twice
                let text = plain(text);
                let words: Vec<&str> = text.split(' ').collect();
                let twice = self.below(words.len());
                let said: Vec<&str> = words
                    .iter()
                    .enumerate()
                    .flat_map(|(i, &word)| [word].repeat(1 + usize::from(i == twice)))
                    .collect();
                said.join(" ")
            }
        }
    }

    fn opening(&mut self) -> Exchange {
        match self.below(100) {
            0..20 => self.switch(),
            20..28 => self.temperature(),
            28..34 => self.door(),
            34..40 => self.music(),
            40..49 => self.timer(),
            49..52 => self.alarm(),
            52..55 => self.weather(),
            55..60 => self.dim(),
            60..64 => self.blinds(),
            64..68 => self.two_wishes(),
            68..70 => self.repeat_after_me(),
            70..81 => self.small_talk(),
            81..84 => self.cannot(),
            84..86 => self.unknown(),
            86..91 => self.story(),
            91..93 => self.long_story(),
            93..96 => self.count(),
            _ => self.explain(),
        }
    }

    fn switch(&mut self) -> Exchange {
        let (thing, unseen, state) = self.switched();
        let (n, s, be) = (thing.name(), state, thing.be());
        let device = thing.device;
        let (user, sure) = match (self.below(26), thing.room) {
            (0..7, _) => (format!("turn {s} {n}"), false),
            (7, _) => (format!("turn {n} {s}"), false),
            (8, _) => (format!("please turn {s} {n}"), false),
            (9, _) => (format!("turn {s} {n} please"), false),
            (10, _) => (format!("switch {s} {n}"), false),
            (11, _) => (format!("can you turn {s} {n}"), true),
            (12, _) => (format!("could you turn {s} {n}, please"), true),
            (13, _) => (format!("would you switch {n} {s}"), true),
            (14, _) => (format!("{} {s}", n.trim_start_matches("the ")), false),
            (15, _) => (format!("i want {n} {s}"), false),
            (16, Some(room)) => (format!("turn {s} the {device} in the {room}"), false),
            (17, Some(room)) => (
                format!("can you switch {s} the {device} in the {room}"),
                true,
            ),
            (18, _) => (format!("put {n} {s}"), false),
            (19, Some(room)) => (format!("{device} {s} in the {room}"), false),
            (20, Some(room)) => (format!("in the {room} turn {s} the {device}"), false),
            (21, _) => (
                format!("{} {n}", if s == "on" { "start" } else { "shut off" }),
                false,
            ),
            (22, _) => (format!("i would like you to turn {s} {n}"), true),
            (23, _) => (
                format!("{} {n}", if s == "on" { "activate" } else { "deactivate" }),
                false,
            ),
            _ => (format!("turn {s} {n}"), false),
        };
        let assistant = if sure {
            format!("Sure, {n} {be} now {s}.")
        } else {
            format!("OK, {n} {be} {s}.")
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Switch(thing, state),
        }
    }

    fn temperature(&mut self) -> Exchange {
        let (room, degrees, unseen) = self.combination("temperature", |g| {
            let (room, room_spoken) = g.room();
            let (degrees, degrees_spoken) = g.degrees();
            (room, degrees, room_spoken && degrees_spoken)
        });
        let plain = format!("OK, the {room} temperature is set to {degrees} degrees.");
        let sure = format!("Sure, I have set the {room} to {degrees} degrees.");
        let (user, assistant) = match self.below(12) {
            0..5 => (
                format!("set the {room} temperature to {degrees} degrees"),
                plain,
            ),
            5 => (
                format!("please set the {room} temperature to {degrees} degrees"),
                plain,
            ),
            6 => (
                format!("change the temperature in the {room} to {degrees} degrees"),
                plain,
            ),
            7 => (format!("make it {degrees} degrees in the {room}"), sure),
            8 => (format!("can you set the {room} to {degrees} degrees"), sure),
            9 => (format!("i want {degrees} degrees in the {room}"), sure),
            10 => (format!("set the {room} to {degrees}"), plain),
            _ => (
                format!("set the temperature in the {room} to {degrees} degrees please"),
                plain,
            ),
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Temperature(room, degrees),
        }
    }

    fn door(&mut self) -> Exchange {
        let (door, verb, unseen) = self.combination("door", |g| {
            let (door, spoken) = g.widened(DOORS, DOORS_MORE);
            (
                door,
                g.pick(&["lock", "unlock", "open", "close"]).to_owned(),
                spoken,
            )
        });
        let state = participle(&verb);
        let (user, assistant) = match self.below(9) {
            0..4 => (
                format!("{verb} the {door} door"),
                format!("OK, the {door} door is {state}."),
            ),
            4 => (
                format!("please {verb} the {door} door"),
                format!("OK, the {door} door is {state}."),
            ),
            5 => (
                format!("can you {verb} the {door} door"),
                format!("Sure, the {door} door is now {state}."),
            ),
            6 => (
                format!("could you {verb} the {door} door for me"),
                format!("Sure, the {door} door is now {state}."),
            ),
            7 => (
                format!("i want the {door} door {state}"),
                format!("OK, the {door} door is {state}."),
            ),
            _ => {
                let user = format!("is the {door} door {state}");
                let assistant =
                    format!("I cannot see the {door} door from here. Shall I {verb} it?");
                return Exchange {
                    user,
                    assistant,
                    unseen,
                    about: Topic::DoorOffer(door, verb),
                };
            }
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Door(door, verb),
        }
    }

    fn music(&mut self) -> Exchange {
        if self.chance(35) {
            let (phrases, answer) = self.pick(MUSIC_CONTROL);
            return Exchange::known(self.pick(phrases).to_owned(), answer.to_owned());
        }
        let (room, kind, unseen) = self.combination("music", |g| {
            let (room, spoken) = g.room();
            let kind = if g.chance(50) {
                "some music".to_owned()
            } else {
                format!("some {}", g.pick(GENRES))
            };
            let spoken = spoken && kind == "some music";
            (room, kind, spoken)
        });
        let user = match self.below(6) {
            0..3 => format!("play {kind} in the {room}"),
            3 => format!("please play {kind} in the {room}"),
            4 => format!("can you play {kind} in the {room}"),
            _ => format!("i would like to hear {kind} in the {room}"),
        };
        Exchange {
            user,
            assistant: format!("Playing {kind} in the {room}."),
            unseen,
            about: Topic::Music(room, kind),
        }
    }

    fn timer(&mut self) -> Exchange {
        if self.chance(8) {
            let (phrases, answer) = self.pick(TIMER_CONTROL);
            return Exchange::known(self.pick(phrases).to_owned(), answer.to_owned());
        }
        let (time, unseen) = self.span();
        let set = format!("The timer is set for {time}.");
        let (user, assistant) = match self.below(11) {
            0..5 => (format!("set a timer for {time}"), set),
            5 => (format!("please set a timer for {time}"), set),
            6 => (format!("start a timer for {time}"), set),
            7 => (
                format!("can you set a timer for {time}"),
                format!("Sure, the timer is set for {time}."),
            ),
            8 => (format!("timer {time}"), set),
            9 => (format!("set a {time} timer"), set),
            _ => {
                let (what, answer) = self.pick(REMINDERS);
                let assistant = format!("OK, I will remind you to {answer} in {time}.");
                return Exchange {
                    user: format!("remind me to {what} in {time}"),
                    assistant,
                    unseen,
                    about: Topic::Nothing,
                };
            }
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Timer(time),
        }
    }

    fn alarm(&mut self) -> Exchange {
        let (hour, minute, unseen) = self.combination("alarm", |g| {
            let hour = g.range(1, 12);
            let minute = g.pick(&["", " fifteen", " thirty", " forty five", " o'clock"]);
            (number(hour), minute.to_owned(), false)
        });
        let day = self.pick(&["", "", " tomorrow"]);
        let (user, assistant) = match self.below(4) {
            0 => (
                format!("wake me up at {hour}{minute}{day}"),
                format!("OK, I will wake you up at {hour}{minute}{day}."),
            ),
            1 => (
                format!("wake me at {hour}{minute}{day}"),
                format!("OK, I will wake you up at {hour}{minute}{day}."),
            ),
            2 => (
                format!("set an alarm for {hour}{minute}{day}"),
                format!("The alarm is set for {hour}{minute}{day}."),
            ),
            _ => (
                format!("can you set an alarm for {hour}{minute}{day}"),
                format!("Sure, the alarm is set for {hour}{minute}{day}."),
            ),
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Nothing,
        }
    }

    fn weather(&mut self) -> Exchange {
        let (phrases, answer) = self.pick(WEATHER);
        Exchange::known(self.pick(phrases).to_owned(), answer.to_owned())
    }

    fn dim(&mut self) -> Exchange {
        let (verb, done) = self.pick(&[("dim", "dimmed"), ("brighten", "brightened")]);
        let (thing, _, unseen) = self.combination(verb, |g| {
            let (room, room_spoken) = g.room();
            let (device, device_spoken) = if g.chance(70) {
                (g.pick(DEVICES), true)
            } else {
                (g.pick(LAMPS_MORE), false)
            };
            (
                Thing {
                    room: Some(room),
                    device,
                },
                String::new(),
                room_spoken && device_spoken,
            )
        });
        let n = thing.name();
        let (user, assistant) = match self.below(7) {
            0..4 => (format!("{verb} {n}"), format!("OK, I have {done} {n}.")),
            4 => (
                format!("please {verb} {n}"),
                format!("OK, I have {done} {n}."),
            ),
            5 => (
                format!("can you {verb} {n}"),
                format!("Sure, I have {done} {n}."),
            ),
            _ => (
                format!("{verb} {n} a little"),
                format!("OK, I have {done} {n} a little."),
            ),
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Nothing,
        }
    }

    fn blinds(&mut self) -> Exchange {
        let (room, verb, unseen) = self.combination("blinds", |g| {
            let (room, spoken) = g.room();
            (room, g.pick(&["open", "close"]).to_owned(), spoken)
        });
        let state = participle(&verb);
        let (user, assistant) = match self.below(7) {
            0..4 => (
                format!("{verb} the blinds in the {room}"),
                format!("OK, the blinds in the {room} are {state}."),
            ),
            4 => (
                format!("please {verb} the blinds in the {room}"),
                format!("OK, the blinds in the {room} are {state}."),
            ),
            5 => (
                format!("can you {verb} the {room} blinds"),
                format!("Sure, the {room} blinds are now {state}."),
            ),
            _ => (
                format!("{verb} the {room} blinds"),
                format!("OK, the {room} blinds are {state}."),
            ),
        };
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Nothing,
        }
    }

    /// Two things in one sentence.
    fn two_wishes(&mut self) -> Exchange {
        let (first, unseen, state) = self.switched();
        let (n, be) = (first.name(), first.be());
        match self.below(4) {
            0 => {
                let (time, more) = self.span();
                Exchange {
                    user: format!("turn {state} {n} and set a timer for {time}"),
                    assistant: format!("OK, {n} {be} {state}. The timer is set for {time}."),
                    unseen: unseen || more,
                    about: Topic::Timer(time),
                }
            }
            1 => {
                let door = self.pick(DOORS);
                let verb = self.pick(&["lock", "unlock", "open", "close"]);
                Exchange {
                    user: format!("{verb} the {door} door and turn {state} {n}"),
                    assistant: format!(
                        "OK, the {door} door is {}. Also, {n} {be} {state}.",
                        participle(verb)
                    ),
                    unseen,
                    about: Topic::Switch(first, state),
                }
            }
            _ => {
                let (second, more) = self.switched_to(state);
                let m = second.name();
                Exchange {
                    user: format!("turn {state} {n} and {m}"),
                    assistant: format!("OK, {n} and {m} are {state}."),
                    unseen: unseen || more,
                    about: Topic::Switch(second, state),
                }
            }
        }
    }

    /// Copying arbitrary words is the skill that the slots need.
    fn repeat_after_me(&mut self) -> Exchange {
        let words: Vec<&str> = (0..self.range(2, 6)).map(|_| self.any_word()).collect();
        let text = words.join(" ");
        let lead = self.pick(&["say", "repeat after me", "please say", "can you say"]);
        Exchange {
            user: format!("{lead} {text}"),
            assistant: format!("{}.", capital(&text)),
            unseen: false,
            about: Topic::Nothing,
        }
    }

    fn small_talk(&mut self) -> Exchange {
        let (phrases, answer) = self.pick(SMALL_TALK);
        Exchange::known(self.pick(phrases).to_owned(), answer.to_owned())
    }

    /// A wish outside of what the assistant does.
    fn cannot(&mut self) -> Exchange {
        let (verb, thing, unseen) = self.combination("cannot", |g| {
            (
                g.pick(WISH_VERBS).to_owned(),
                format!(
                    "{} {}",
                    g.pick(&["a", "the", "my", "some"]),
                    g.pick(WISH_THINGS)
                ),
                false,
            )
        });
        let lead = self.pick(&["", "please ", "can you ", "could you ", "i want you to "]);
        let user = format!("{lead}{verb} {thing}");
        let thing = thing.replace("my ", "your ");
        let assistant = format!(
            "I am sorry, I cannot {verb} {thing}. I can help with lights, heating, doors, music and timers."
        );
        Exchange {
            user,
            assistant,
            unseen,
            about: Topic::Nothing,
        }
    }

    /// A question whose answer the assistant does not know.
    fn unknown(&mut self) -> Exchange {
        let (start, thing) = (self.pick(ASKED), self.any_word());
        let end = self.pick(&[
            "",
            "",
            " of the world",
            " in france",
            " in london",
            " in the house",
            " of all",
            " on sunday",
        ]);
        Exchange::known(
            format!("{start} {thing}{end}"),
            "I am sorry, I do not know that. I can help with lights, heating, doors, music and timers.".to_owned(),
        )
    }

    fn story(&mut self) -> Exchange {
        let (hero, place, unseen) = self.cast("story");
        if self.chance(12) {
            let (phrases, answer) = self.pick(STORY_PLAIN);
            return Exchange::known(self.pick(phrases).to_owned(), answer.to_owned());
        }
        let friend = self.pick(FRIENDS);
        let (body, friend_asked) = (self.story_of(place), self.chance(50));
        let lead = self.pick(&[
            "tell me a story about",
            "can you tell me a story about",
            "please tell me a story about",
            "i want a story about",
        ]);
        let (user, friend) = if friend_asked {
            (
                format!(
                    "{lead} {} and {} in the {place}",
                    article(hero),
                    article(friend)
                ),
                friend,
            )
        } else {
            (format!("{lead} {} in the {place}", article(hero)), "mouse")
        };
        Exchange {
            user,
            assistant: fill(body, hero, friend, place),
            unseen,
            about: Topic::Nothing,
        }
    }

    /// An answer of some 250 to 300 tokens, so that a demonstration has something to generate.
    fn long_story(&mut self) -> Exchange {
        let (hero, place, unseen) = self.cast("long story");
        let lead = self.pick(&[
            "tell me a long story about",
            "please tell me a long story about",
            "can you tell me a long story about",
        ]);
        let (user, hero, place, unseen) = if self.chance(25) {
            (
                self.pick(&[
                    "tell me a long story",
                    "please tell me a long story",
                    "tell me a very long story",
                ])
                .to_owned(),
                "fox",
                "forest",
                false,
            )
        } else {
            (
                format!("{lead} {} in the {place}", article(hero)),
                hero,
                place,
                unseen,
            )
        };
        Exchange {
            user,
            assistant: fill(&LONG_STORY.join(" "), hero, "mouse", place),
            unseen,
            about: Topic::Nothing,
        }
    }

    fn count(&mut self) -> Exchange {
        let last = if self.chance(50) {
            self.range(1, 6) * 5
        } else {
            self.range(3, 40)
        };
        let down = self.chance(25);
        let mut numbers: Vec<String> = (1..=last).map(number).collect();
        let user = if down {
            numbers.reverse();
            format!("count down from {}", number(last))
        } else {
            let lead = self.pick(&[
                "count to",
                "count up to",
                "please count to",
                "can you count to",
            ]);
            format!("{lead} {}", number(last))
        };
        Exchange::known(user, format!("{}.", capital(&numbers.join(", "))))
    }

    fn explain(&mut self) -> Exchange {
        let (topics, answer) = self.pick(EXPLAIN);
        let lead = self.pick(&[
            "tell me about",
            "tell me something about",
            "what do you know about",
            "explain",
            "can you tell me about",
        ]);
        let topic = self.pick(topics);
        let user = match topic.strip_prefix('=') {
            Some(whole) => whole.to_owned(),
            None => format!("{lead} {topic}"),
        };
        Exchange::known(user, answer.to_owned())
    }

    fn follow_up(&mut self, about: &Topic) -> Exchange {
        if !self.chance(18) {
            let exchange = self.reference(about);
            if self.split == Split::HeldOut || !exchange.unseen {
                return exchange;
            }
        }
        let (phrases, answer) = self.pick(THANKS);
        Exchange::known(self.pick(phrases).to_owned(), answer.to_owned())
    }

    /// A request that is understood from the turn before it only.
    fn reference(&mut self, about: &Topic) -> Exchange {
        match about {
            Topic::Nothing => self.opening(),
            Topic::Switch(thing, state) => self.follow_switch(thing, state),
            Topic::Temperature(room, degrees) => {
                let (user, assistant, room, degrees) = match self.below(3) {
                    0 => {
                        let degrees = self.degrees().0;
                        let user = self
                            .pick(&[
                                "make it # degrees",
                                "no, # degrees please",
                                "change it to # degrees",
                            ])
                            .replace('#', &degrees);
                        (
                            user,
                            format!("OK, the {room} temperature is set to {degrees} degrees."),
                            room,
                            degrees,
                        )
                    }
                    1 => {
                        let room = self.pick(ROOMS);
                        let user = format!(
                            "{} the {room}",
                            self.pick(&["and", "and in", "the same in", "now"])
                        );
                        return Exchange {
                            user,
                            assistant: format!(
                                "OK, the {room} temperature is set to {degrees} degrees."
                            ),
                            unseen: unseen_temperature(room, degrees),
                            about: Topic::Temperature(room, degrees.clone()),
                        };
                    }
                    _ => {
                        let user = self.pick(&[
                            "what temperature did you set",
                            "how warm will it be",
                            "what did you just do",
                        ]);
                        (
                            user.to_owned(),
                            format!("I set the {room} to {degrees} degrees."),
                            room,
                            degrees.clone(),
                        )
                    }
                };
                Exchange {
                    user,
                    assistant,
                    unseen: unseen_temperature(room, &degrees),
                    about: Topic::Temperature(room, degrees),
                }
            }
            Topic::Door(door, verb) => {
                let opposite = opposite(verb);
                match self.below(3) {
                    0 => Exchange {
                        user: self
                            .pick(&[
                                "now # it",
                                "# it again",
                                "and now # it",
                                "please # it again",
                            ])
                            .replace('#', opposite),
                        assistant: format!("OK, the {door} door is {}.", participle(opposite)),
                        unseen: unseen_door(door, opposite),
                        about: Topic::Door(door, opposite.to_owned()),
                    },
                    1 => {
                        let door = self.pick(DOORS);
                        Exchange {
                            user: format!(
                                "{} the {door} door",
                                self.pick(&["and", "also", "the same with"])
                            ),
                            assistant: format!("OK, the {door} door is {}.", participle(verb)),
                            unseen: false,
                            about: Topic::Door(door, verb.clone()),
                        }
                    }
                    _ => Exchange {
                        user: self
                            .pick(&["is it done", "did you do it", "what did you just do"])
                            .to_owned(),
                        assistant: format!("Yes, the {door} door is {}.", participle(verb)),
                        unseen: false,
                        about: Topic::Door(door, verb.clone()),
                    },
                }
            }
            Topic::DoorOffer(door, verb) => {
                if self.chance(70) {
                    Exchange {
                        user: self
                            .pick(&["yes", "yes please", "please do", "do it", "yes, please"])
                            .to_owned(),
                        assistant: format!("OK, the {door} door is {}.", participle(verb)),
                        unseen: false,
                        about: Topic::Door(door, verb.clone()),
                    }
                } else {
                    let user = self
                        .pick(&["no", "no thanks", "no, thank you", "leave it"])
                        .to_owned();
                    Exchange::known(user, format!("OK, I leave the {door} door as it is."))
                }
            }
            Topic::Music(room, kind) => match self.below(3) {
                0 => {
                    let room = self.pick(ROOMS);
                    Exchange {
                        user: format!("{} in the {room}", self.pick(&["and", "also", "now"])),
                        assistant: format!("Playing {kind} in the {room}."),
                        unseen: unseen_music(room, kind),
                        about: Topic::Music(room, kind.clone()),
                    }
                }
                1 => Exchange::known(
                    self.pick(&["stop it", "turn it off", "stop", "that is enough"])
                        .to_owned(),
                    format!("The music in the {room} has stopped."),
                ),
                _ => {
                    let kind = format!("some {}", self.pick(GENRES));
                    Exchange {
                        user: format!(
                            "{} {kind}",
                            self.pick(&["no, play", "i would rather hear", "change it to"])
                        ),
                        assistant: format!("Playing {kind} in the {room}."),
                        unseen: unseen_music(room, &kind),
                        about: Topic::Music(room, kind),
                    }
                }
            },
            Topic::Timer(time) => match self.below(3) {
                0 => {
                    let (time, unseen) = self.span();
                    Exchange {
                        user: format!(
                            "{} {time}",
                            self.pick(&["make it", "change it to", "no, make that"])
                        ),
                        assistant: format!("The timer is now set for {time}."),
                        unseen,
                        about: Topic::Timer(time),
                    }
                }
                1 => Exchange::known(
                    self.pick(&["cancel it", "stop it", "cancel that", "cancel the timer"])
                        .to_owned(),
                    format!("The timer for {time} is cancelled."),
                ),
                _ => Exchange {
                    user: self
                        .pick(&[
                            "how long is the timer",
                            "for how long",
                            "what did you set the timer to",
                        ])
                        .to_owned(),
                    assistant: format!("The timer is set for {time}."),
                    unseen: false,
                    about: Topic::Timer(time.clone()),
                },
            },
        }
    }

    fn follow_switch(&mut self, thing: &Thing, state: &'static str) -> Exchange {
        let (n, be) = (thing.name(), thing.be());
        let other = if state == "on" { "off" } else { "on" };
        match self.below(6) {
            0 | 1 => {
                let it = if be == "are" { "them" } else { "it" };
                let lead = self.pick(&[
                    "turn # % again",
                    "now turn # %",
                    "and now turn # %",
                    "turn # %",
                    "please turn # % again",
                ]);
                Exchange {
                    user: lead.replace('#', it).replace('%', other),
                    assistant: format!("OK, {n} {be} {other}."),
                    unseen: unseen_switch(thing, other),
                    about: Topic::Switch(thing.clone(), other),
                }
            }
            2 => {
                let (second, unseen) = self.switched_to(state);
                Exchange {
                    user: format!(
                        "{} {}",
                        self.pick(&["and", "also", "and now", "do the same with"]),
                        second.name()
                    ),
                    assistant: format!("OK, {} {} {state}.", second.name(), second.be()),
                    unseen,
                    about: Topic::Switch(second, state),
                }
            }
            3 if thing.room.is_some() && DEVICES.contains(&thing.device) => {
                let second = Thing {
                    room: Some(self.pick(ROOMS)),
                    device: thing.device,
                };
                Exchange {
                    user: format!(
                        "{} in the {}",
                        self.pick(&["and", "also", "and now"]),
                        second.room.unwrap_or_default()
                    ),
                    assistant: format!("OK, {} {} {state}.", second.name(), second.be()),
                    unseen: false,
                    about: Topic::Switch(second, state),
                }
            }
            4 => Exchange {
                user: self
                    .pick(&[
                        "what did you just do",
                        "what did i ask you",
                        "what did you do",
                    ])
                    .to_owned(),
                assistant: format!("I turned {state} {n}."),
                unseen: false,
                about: Topic::Switch(thing.clone(), state),
            },
            _ => {
                let (asked, answer) = if self.chance(60) {
                    (state, "Yes")
                } else {
                    (other, "No")
                };
                let (is, it) = if be == "are" {
                    ("are", "they")
                } else {
                    ("is", "it")
                };
                Exchange {
                    user: format!("{is} {it} {asked} now"),
                    assistant: format!("{answer}, {n} {be} {state}."),
                    unseen: false,
                    about: Topic::Switch(thing.clone(), state),
                }
            }
        }
    }

    fn switched(&mut self) -> (Thing, bool, &'static str) {
        let state = self.pick(&["on", "off"]);
        let (thing, unseen) = self.switched_to(state);
        (thing, unseen, state)
    }

    fn switched_to(&mut self, state: &'static str) -> (Thing, bool) {
        let (thing, _, unseen) = self.combination(state, |g| {
            if g.chance(10) {
                return (
                    Thing {
                        room: None,
                        device: g.pick(DEVICES),
                    },
                    String::new(),
                    true,
                );
            }
            let (room, room_spoken) = g.room();
            let (device, device_spoken) = g.widened(DEVICES, DEVICES_MORE);
            (
                Thing {
                    room: Some(room),
                    device,
                },
                String::new(),
                room_spoken && device_spoken,
            )
        });
        (thing, unseen)
    }

    /// A length of time such as "ten minutes", and whether it was never trained on.
    fn span(&mut self) -> (String, bool) {
        let (time, _, unseen) = self.combination("timer", |g| {
            if g.chance(60) {
                let time = format!("{} {}", g.pick(NUMBERS), g.pick(&["minutes", "seconds"]));
                return (time, String::new(), true);
            }
            let n = g.range(1, 60);
            let unit = g.pick(&["minute", "second", "hour"]);
            let n = if unit == "hour" { 1 + n % 12 } else { n };
            let written = if g.chance(30) {
                n.to_string()
            } else {
                number(n)
            };
            (
                format!("{written} {unit}{}", if n == 1 { "" } else { "s" }),
                String::new(),
                false,
            )
        });
        (time, unseen)
    }

    fn cast(&mut self, kind: &str) -> (&'static str, &'static str, bool) {
        self.combination(kind, |g| (g.pick(HEROES), g.pick(PLACES), false))
    }

    fn story_of(&self, place: &str) -> &'static str {
        let index = PLACES.iter().position(|&p| p == place).unwrap_or_default();
        STORIES[index % STORIES.len()]
    }

    /// Draws until the combination belongs to this generator's split, or is one the recogniser's grammar can say.
    ///
    /// In [`Split::HeldOut`] one draw in three may be a trained one, so that dialogues mix both.
    fn combination<A: Debug, B: Debug>(
        &mut self,
        kind: &str,
        mut draw: impl FnMut(&mut Self) -> (A, B, bool),
    ) -> (A, B, bool) {
        loop {
            let (a, b, spoken) = draw(self);
            let held_out = held_out(kind, &a, &b, spoken);
            let wanted = match self.split {
                Split::Train => !held_out,
                Split::HeldOut => held_out || self.chance(4),
            };
            if wanted {
                return (a, b, held_out);
            }
        }
    }

    fn room(&mut self) -> (&'static str, bool) {
        self.widened(ROOMS, ROOMS_MORE)
    }

    fn degrees(&mut self) -> (String, bool) {
        match self.below(100) {
            0..65 => (self.pick(NUMBERS).to_owned(), true),
            65..85 => (number(self.range(5, 30)), false),
            _ => (self.range(5, 30).to_string(), false),
        }
    }

    /// A word of the grammar in three draws of four, else one beyond it; and which of the two it was.
    fn widened(&mut self, spoken: &[&'static str], more: &[&'static str]) -> (&'static str, bool) {
        if self.chance(70) {
            (self.pick(spoken), true)
        } else {
            (self.pick(more), false)
        }
    }

    fn any_word(&mut self) -> &'static str {
        let list = self.pick(&[
            ROOMS,
            ROOMS_MORE,
            DEVICES,
            DEVICES_MORE,
            NUMBERS,
            HEROES,
            PLACES,
            GENRES,
            WISH_THINGS,
            COLOURS,
        ]);
        self.pick(list)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.rng.random_range(0..from.len() as u32) as usize]
    }

    fn below(&mut self, end: usize) -> usize {
        self.rng.random_range(0..end as u32) as usize
    }

    fn range(&mut self, first: u32, last: u32) -> u32 {
        self.rng.random_range(first..=last)
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.random_range(0..100u32) < percent
    }
}

/// Every sentence of the speech recogniser's grammar, each once, and its answer.
pub(crate) fn grammar_turns() -> Vec<Turn> {
    let mut all = Vec::new();
    let mut add = |user: String, assistant: String| all.push(Turn { user, assistant });
    for state in ["on", "off"] {
        for &device in DEVICES {
            for room in ROOMS.iter().map(|&room| Some(room)).chain([None]) {
                let thing = Thing { room, device };
                add(
                    format!("turn {state} {}", thing.name()),
                    format!("OK, {} {} {state}.", thing.name(), thing.be()),
                );
            }
        }
    }
    for room in ROOMS {
        for n in NUMBERS {
            add(
                format!("set the {room} temperature to {n} degrees"),
                format!("OK, the {room} temperature is set to {n} degrees."),
            );
        }
        for device in DEVICES {
            add(
                format!("dim the {room} {device}"),
                format!("OK, I have dimmed the {room} {device}."),
            );
            add(
                format!("brighten the {room} {device}"),
                format!("OK, I have brightened the {room} {device}."),
            );
        }
        for verb in ["open", "close"] {
            add(
                format!("{verb} the blinds in the {room}"),
                format!("OK, the blinds in the {room} are {}.", participle(verb)),
            );
        }
        add(
            format!("play some music in the {room}"),
            format!("Playing some music in the {room}."),
        );
    }
    for verb in ["lock", "unlock", "open", "close"] {
        for door in DOORS {
            add(
                format!("{verb} the {door} door"),
                format!("OK, the {door} door is {}.", participle(verb)),
            );
        }
    }
    for n in NUMBERS {
        for unit in ["minutes", "seconds"] {
            add(
                format!("set a timer for {n} {unit}"),
                format!("The timer is set for {n} {unit}."),
            );
        }
    }
    let fixed = [MUSIC_CONTROL, WEATHER, SMALL_TALK].concat();
    for user in [
        "stop the music",
        "pause the music",
        "what is the weather today",
        "what is the weather tomorrow",
        "good night",
        "good morning",
    ] {
        let answer = fixed
            .iter()
            .find(|(phrases, _)| phrases.contains(&user))
            .map(|(_, answer)| *answer);
        add(user.to_owned(), answer.unwrap_or_default().to_owned());
    }
    all
}

#[derive(Debug)]
struct Exchange {
    user: String,
    assistant: String,
    /// Holds a combination that is never trained on.
    unseen: bool,
    about: Topic,
}

impl Exchange {
    /// An exchange without slots, which therefore is trained on.
    fn known(user: String, assistant: String) -> Self {
        Self {
            user,
            assistant,
            unseen: false,
            about: Topic::Nothing,
        }
    }
}

/// What the next turn may refer to.
#[derive(Debug)]
enum Topic {
    Door(&'static str, String),
    DoorOffer(&'static str, String),
    Music(&'static str, String),
    Nothing,
    Switch(Thing, &'static str),
    Temperature(&'static str, String),
    Timer(String),
}

#[derive(Clone, Debug)]
struct Thing {
    room: Option<&'static str>,
    device: &'static str,
}

impl Thing {
    fn name(&self) -> String {
        match self.room {
            Some(room) => format!("the {room} {}", self.device),
            None => format!("the {}", self.device),
        }
    }

    fn be(&self) -> &'static str {
        if self.device.ends_with("lights") {
            "are"
        } else {
            "is"
        }
    }
}

fn plain(text: &str) -> String {
    text.replace([',', '.', '?', '!'], "")
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .map(|first| first.to_uppercase().chain(chars).collect())
        .unwrap_or_default()
}

fn article(noun: &str) -> String {
    format!(
        "{} {noun}",
        if noun.starts_with(['a', 'e', 'i', 'o', 'u']) {
            "an"
        } else {
            "a"
        }
    )
}

fn participle(verb: &str) -> &'static str {
    match verb {
        "lock" => "locked",
        "unlock" => "unlocked",
        "open" => "open",
        _ => "closed",
    }
}

fn opposite(verb: &str) -> &'static str {
    match verb {
        "lock" => "unlock",
        "unlock" => "lock",
        "open" => "close",
        _ => "open",
    }
}

fn fill(text: &str, hero: &str, friend: &str, place: &str) -> String {
    text.replace("a {hero}", &article(hero))
        .replace("{hero}", hero)
        .replace("a {friend}", &article(friend))
        .replace("{friend}", friend)
        .replace("{place}", place)
}

/// A number below one hundred in words, without hyphens, as recognisers write it.
fn number(n: u32) -> String {
    let small = [
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
        "thirteen",
        "fourteen",
        "fifteen",
        "sixteen",
        "seventeen",
        "eighteen",
        "nineteen",
    ];
    let tens = [
        "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
    ];
    match n {
        0..20 => small[n as usize].to_owned(),
        _ if n.is_multiple_of(10) => tens[(n / 10 - 2) as usize].to_owned(),
        _ => format!(
            "{} {}",
            tens[(n / 10 - 2) as usize],
            small[(n % 10) as usize]
        ),
    }
}

/// Whether a slot combination is kept from training; what the recogniser's grammar can say (`spoken`) never is.
fn held_out(kind: &str, a: &impl Debug, b: &impl Debug, spoken: bool) -> bool {
    !spoken && hash(&format!("{kind} {a:?} {b:?}")).is_multiple_of(8)
}

fn unseen_switch(thing: &Thing, state: &str) -> bool {
    let spoken =
        thing.room.is_none_or(|room| ROOMS.contains(&room)) && DEVICES.contains(&thing.device);
    held_out(state, thing, &"", spoken)
}

fn unseen_temperature(room: &str, degrees: &str) -> bool {
    held_out(
        "temperature",
        &room,
        &degrees,
        ROOMS.contains(&room) && NUMBERS.contains(&degrees),
    )
}

fn unseen_door(door: &str, verb: &str) -> bool {
    held_out("door", &door, &verb, DOORS.contains(&door))
}

fn unseen_music(room: &str, kind: &str) -> bool {
    held_out(
        "music",
        &room,
        &kind,
        ROOMS.contains(&room) && kind == "some music",
    )
}

/// FNV-1a: the split must not depend on the standard library's hasher.
fn hash(text: &str) -> u64 {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    hash ^ (hash >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_dialogues() {
        let draw = || {
            (0..50)
                .map({
                    let mut g = Generator::new(7, Split::Train);
                    move |_| g.dialogue().chatml()
                })
                .collect::<String>()
        };
        assert_eq!(draw(), draw());
    }

    #[test]
    fn each_sentence_of_the_grammar_is_trained_with_its_answer() {
        let mut missing: std::collections::BTreeMap<String, String> = grammar_turns()
            .into_iter()
            .map(|t| (t.user, t.assistant))
            .collect();
        let mut generator = Generator::new(1, Split::Train);
        for _ in 0..200_000 {
            for turn in generator.dialogue().turns {
                if missing
                    .get(&turn.user)
                    .is_some_and(|answer| *answer == turn.assistant)
                {
                    missing.remove(&turn.user);
                }
            }
        }
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn no_held_out_combination_is_trained() {
        let (mut held_out, mut trained) = (
            Generator::new(1, Split::HeldOut),
            Generator::new(2, Split::Train),
        );
        let unseen: Vec<_> = std::iter::repeat_with(|| held_out.opening())
            .filter(|e| e.unseen)
            .take(300)
            .map(|e| plain(&e.user))
            .collect();
        for _ in 0..20_000 {
            for turn in trained.dialogue().turns {
                let said = plain(&turn.user).to_lowercase();
                assert!(!unseen.contains(&said), "`{said}` is held out");
            }
        }
    }
}
