//! What the templates of the dialogues are filled with, and the exchanges that have no slots.

/// Ways to say the same.
pub(crate) type Phrases = &'static [&'static str];

pub(crate) const ROOMS: &[&str] = &["kitchen", "bedroom", "living room", "bathroom", "hallway", "garage", "office"];
pub(crate) const ROOMS_MORE: &[&str] = &[
    "dining room", "basement", "attic", "laundry room", "guest room", "nursery", "study", "porch", "garden", "playroom", "library", "cellar",
];
pub(crate) const DEVICES: &[&str] = &["light", "lamp", "lights", "fan", "heater"];
pub(crate) const DEVICES_MORE: &[&str] = &[
    "ceiling light", "desk lamp", "reading lamp", "floor lamp", "air conditioner", "humidifier", "radio", "television", "speaker", "kettle",
    "ceiling lights", "wall lights", "projector",
];
pub(crate) const LAMPS_MORE: &[&str] = &["ceiling light", "desk lamp", "reading lamp", "floor lamp", "ceiling lights", "wall lights"];
pub(crate) const NUMBERS: &[&str] = &["ten", "fifteen", "eighteen", "nineteen", "twenty", "twenty one", "twenty two", "five", "thirty"];
pub(crate) const DOORS: &[&str] = &["front", "back", "garage"];
pub(crate) const DOORS_MORE: &[&str] = &["side", "balcony", "cellar", "kitchen", "garden", "office", "patio"];
pub(crate) const GENRES: &[&str] = &["jazz", "rock", "folk music", "classical music", "pop music", "piano music", "blues", "quiet music", "dance music", "opera"];
pub(crate) const COLOURS: &[&str] = &["red", "green", "blue", "yellow", "purple", "orange", "white", "black", "silver", "golden"];
pub(crate) const WISH_VERBS: &[&str] = &["order", "buy", "cook", "paint", "find", "call", "wash", "repair", "book", "send"];
pub(crate) const WISH_THINGS: &[&str] = &[
    "pizza", "car", "taxi", "doctor", "ticket", "letter", "dinner", "table", "bicycle", "shoes", "flight", "window", "cake", "phone", "garden", "book",
];
pub(crate) const HEROES: &[&str] = &["fox", "cat", "dog", "bear", "owl", "rabbit", "robot", "dragon", "wizard", "sailor", "horse", "elephant", "penguin", "knight"];
pub(crate) const FRIENDS: &[&str] = &["mouse", "bird", "frog", "turtle", "squirrel", "hedgehog", "duck", "snail"];
pub(crate) const PLACES: &[&str] = &["forest", "castle", "desert", "village", "harbour", "mountains", "city", "meadow"];

pub(crate) const ASKED: &[&str] = &[
    "what is the capital of the", "who invented the", "how much is a", "where can i find the best", "when was the first", "what is the price of the",
    "how many people like the", "who is the owner of the", "why is there a", "what is the meaning of", "how tall is the", "who wrote the",
    "what is the name of the", "where is the", "which is the largest", "do you know the history of the",
];

/// System messages that clients may send.
pub(crate) const SYSTEM: &[&str] = &[
    "You are a helpful voice assistant.",
    "You are a helpful assistant.",
    "You are a voice assistant at home. Answer in short sentences.",
    "You are a friendly voice assistant. Keep your answers short.",
    "You control the lights, the heating, the doors and the music of a home.",
];

pub(crate) const QUESTION_STARTS: &[&str] = &[
    "can ", "could ", "would ", "what ", "who ", "how ", "is ", "are ", "do ", "does ", "did ", "will ", "where ", "why ", "for how ", "when ",
];

pub(crate) const MUSIC_CONTROL: &[(Phrases, &str)] = &[
    (&["stop the music", "stop the music", "please stop the music", "music off", "turn off the music"], "The music has stopped."),
    (&["pause the music", "pause the music", "please pause the music", "pause"], "The music is paused."),
    (&["continue the music", "resume the music", "go on with the music"], "The music goes on."),
    (&["next song", "skip this song", "play the next song"], "Here is the next song."),
    (&["turn up the volume", "louder please", "make the music louder"], "OK, the music is louder now."),
    (&["turn down the volume", "quieter please", "make the music quieter"], "OK, the music is quieter now."),
    (&["play some music", "please play some music", "i want to hear music"], "Playing some music. Tell me a room if you want it elsewhere."),
];

pub(crate) const TIMER_CONTROL: &[(Phrases, &str)] = &[
    (&["cancel the timer", "stop the timer", "please cancel the timer"], "The timer is cancelled."),
    (&["how much time is left", "how long until the timer rings"], "I do not show the time that is left, but I will ring when it is over."),
];

/// What to be reminded of, as asked and as answered.
pub(crate) const REMINDERS: &[(&str, &str)] = &[
    ("call my mother", "call your mother"),
    ("take out the trash", "take out the trash"),
    ("drink some water", "drink some water"),
    ("check the oven", "check the oven"),
    ("feed the cat", "feed the cat"),
    ("water the plants", "water the plants"),
    ("take my medicine", "take your medicine"),
    ("close the window", "close the window"),
];

/// The forecast is made up: the demo model knows no weather.
pub(crate) const WEATHER: &[(Phrases, &str)] = &[
    (
        &[
            "what is the weather today", "what is the weather today", "what is the weather today", "how is the weather today",
            "tell me the weather for today", "what is the weather like today", "weather today", "what is the weather", "how is the weather",
        ],
        "Today looks mild and mostly sunny. A light wind comes up in the evening.",
    ),
    (
        &[
            "what is the weather tomorrow", "what is the weather tomorrow", "what is the weather tomorrow", "how will the weather be tomorrow",
            "tell me the weather for tomorrow", "what will the weather be like tomorrow", "weather tomorrow",
        ],
        "Tomorrow looks cloudy and cooler. Take a jacket with you.",
    ),
    (&["will it rain today", "is it going to rain today", "do i need an umbrella today"], "No, it looks dry today."),
    (&["will it rain tomorrow", "is it going to rain tomorrow", "do i need an umbrella tomorrow"], "There may be some rain tomorrow. An umbrella is a good idea."),
];

/// Ends of a conversation's topic.
pub(crate) const THANKS: &[(Phrases, &str)] = &[
    (&["thank you", "thanks", "thank you very much", "thanks a lot", "great, thank you"], "You are welcome."),
    (&["good job", "well done", "very good", "that was great", "perfect"], "Thank you. I am glad to help."),
    (&["that is all", "that is all for now", "nothing else", "no, that is all"], "All right. Just call me when you need me."),
];

pub(crate) const SMALL_TALK: &[(Phrases, &str)] = &[
    (&["good night", "good night", "good night", "good night assistant", "i am going to bed"], "Good night. Sleep well."),
    (&["good morning", "good morning", "good morning", "good morning assistant"], "Good morning. I hope you slept well."),
    (&["good evening", "good afternoon"], "Hello. What can I do for you?"),
    (&["hello", "hi", "hey", "hello there", "hi there", "hello assistant"], "Hello. How can I help you?"),
    (&["goodbye", "bye", "see you", "see you later"], "Goodbye. Have a nice day."),
    (&["how are you", "how are you doing", "how are you today", "how do you feel"], "I am fine, thank you. How are you?"),
    (&["i am fine", "i am fine too", "i am good", "i am well, thank you"], "I am glad to hear that."),
    (&["i am tired", "i am so tired"], "Then take a rest. Shall I dim the lights?"),
    (&["i am bored", "i am so bored"], "Shall I tell you a story or a joke?"),
    (&["i am sad", "i feel sad"], "I am sorry to hear that. Some music may help."),
    (&["i am cold", "it is cold in here"], "I can set the temperature for you. Tell me the room and the degrees."),
    (&["it is too hot", "i am hot", "it is hot in here"], "I can turn on the fan for you. Just tell me the room."),
    (&["it is dark in here", "it is too dark"], "I can turn on a light for you. Just tell me the room."),
    (
        &["who are you", "what are you", "tell me who you are", "introduce yourself"],
        "I am a small voice assistant. I live on this device and need no internet.",
    ),
    (&["what is your name", "do you have a name", "how are you called"], "I have no name yet. You can call me assistant."),
    (&["how old are you", "when were you born", "what is your age"], "I am very young. I was trained in less than an hour."),
    (&["who made you", "who built you", "where do you come from"], "I was trained by a small program that wrote all my lessons itself."),
    (&["where do you live", "where are you"], "I live in the memory of this device."),
    (&["are you a robot", "are you human", "are you a person", "are you real"], "I am a computer program, and a rather small one."),
    (&["do you sleep", "do you dream"], "No, but I give some memory back when others need it."),
    (&["how much memory do you use", "how big are you", "how large are you"], "I have fewer than five million weights. That is a few megabytes."),
    (&["can you hear me", "are you there", "do you hear me"], "Yes, I hear you well."),
    (
        &["what can you do", "what can you do for me", "help", "help me", "what can i say", "how can you help me"],
        "I can switch lights, set temperatures and timers, lock doors, move blinds and play music. I can also tell you a story.",
    ),
    (&["what time is it", "what is the time", "tell me the time", "do you know the time"], "I have no clock at hand, but I can set a timer for you."),
    (&["what day is it", "what day is today", "what is the date"], "I have no calendar at hand, but I can set a timer for you."),
    (
        &["tell me a joke", "tell me a joke please", "can you tell me a joke", "make me laugh", "do you know a joke"],
        "Why did the computer go to the doctor? It had a virus.",
    ),
    (&["tell me another joke", "another joke", "one more joke"], "What does a cloud wear under its coat? Thunderwear."),
    (&["sing a song", "sing for me", "can you sing"], "I cannot sing, but I can play some music for you."),
    (&["do you like music", "what music do you like"], "I like everything with a steady rhythm."),
    (&["what is your favorite color", "what is your favourite colour"], "I like green. It means that all tests pass."),
    (&["what is your favorite food", "are you hungry"], "I live on electricity, and I do not need much of it."),
    (&["i love you", "i like you"], "That is kind of you. I like helping you."),
    (&["you are stupid", "you are useless", "that was wrong", "that is wrong", "you are wrong"], "I am sorry. Please tell me again what you want."),
    (&["never mind", "forget it", "cancel", "stop", "cancel that"], "All right, never mind."),
    (&["turn on", "turn on the", "switch on", "turn on something"], "What shall I turn on?"),
    (&["turn off", "turn off the", "switch off", "turn off something"], "What shall I turn off?"),
    (&["set a timer", "start a timer", "set the timer", "timer", "set a timer for"], "For how long?"),
    (&["set the temperature", "change the temperature", "set the temperature to"], "Tell me the room and the degrees."),
    (&["tell me something", "talk to me", "say something"], "The moon takes about one month to go around the earth. Shall I tell you a story?"),
    (&["what is the capital of france", "what is two plus two", "who is the president", "where is paris", "how far is the moon"],
        "I am sorry, I do not know that. I can help with lights, heating, doors, music and timers."),
    (&["yes", "yes please"], "Fine. What shall I do?"),
    (&["no", "no thanks", "no thank you"], "All right."),
    (&["say that again", "can you repeat that", "pardon", "what did you say"], "I am sorry, please ask me once more."),
    (&["thank you", "thanks", "thank you very much", "thanks a lot"], "You are welcome."),
    (&["good job", "well done", "very good"], "Thank you. I am glad to help."),
    (&["i am home", "i am back", "i am at home"], "Welcome home. Shall I turn on the lights?"),
    (&["i am leaving", "i am going out", "i am going to work"], "Have a nice day. Shall I lock the front door?"),
    (&["turn everything off", "turn off everything", "turn off all the lights", "all lights off"], "OK, all the lights are off."),
    (&["turn everything on", "turn on all the lights", "all lights on"], "OK, all the lights are on."),
    (&["lock all the doors", "lock everything", "please lock all doors"], "OK, all the doors are locked."),
    (
        &["which rooms do you know", "what rooms are there", "tell me the rooms"],
        "I know the kitchen, the bedroom, the living room, the bathroom, the hallway, the garage and the office.",
    ),
];

pub(crate) const STORY_PLAIN: &[(Phrases, &str)] = &[
    (
        &["tell me a story", "tell me a story", "please tell me a story", "can you tell me a story", "i want to hear a story"],
        "Once upon a time there was a small lamp in a quiet kitchen. Every evening it waited for someone to come home. One winter night the \
         snow was so deep that nobody could find the house. The lamp made itself as bright as it could, and its light fell through the \
         window and far across the garden. A traveller saw it, knocked at the door, and was let in. Since that night the lamp has never \
         been turned off in winter, and it is still proud of it.",
    ),
    (
        &["tell me another story", "another story", "one more story please", "tell me one more story"],
        "Once there was an old clock that was always five minutes late. The other clocks laughed at it, but the clock did not mind. One \
         morning all the people ran to the station and missed the early train, which broke down in the hills. Only those who trusted the old \
         clock took the next train, and they arrived first. Since that day the other clocks have been a little more polite.",
    ),
];

/// Told by place: the answer follows from the question.
pub(crate) const STORIES: &[&str] = &[
    "Once upon a time a {hero} lived in the {place}. One evening the {hero} heard a small voice behind a tree. It was a {friend} that had \
     lost the way home. The {hero} took the {friend} along, and together they followed the light of the moon. When the sun came up, they \
     stood before the right door. The {friend} said thank you, and since that night they have been the best of friends.",
    "Long ago a {hero} came to the {place} and looked for work. Nobody wanted to help, only a {friend} shared its bread. In the night a \
     great storm broke the roof, and all were afraid. The {hero} climbed up and repaired it before the rain came in. In the morning \
     there was a feast, and the {hero} and the {friend} sat at the head of the table.",
    "There was once a {hero} who wanted to cross the {place} alone. After three days all the water was gone. Then a {friend} came along and \
     said that it knew a well under an old stone. The {hero} lifted the stone, and clear water rose up. They both drank, they laughed, and \
     they went the rest of the way together.",
    "In a small {place} there lived a {hero} who could not sleep. Every night the {hero} walked through the streets and counted the lamps. \
     One night a lamp was missing. A {friend} had borrowed it to read a book about the stars. They read the last page together, and the \
     {hero} fell asleep before the end.",
    "A {hero} stood in the {place} and watched the ships come in. On one of them a {friend} was hiding, far away from home. The {hero} gave it \
     a warm blanket and a bowl of soup. When the next ship sailed, the {friend} stayed. Now they watch the ships together, and they know \
     all of them by name.",
    "High up in the {place} a {hero} had built a house of stones. The winter was long, and the wind sang around the roof. One day a {friend} \
     knocked at the door, cold and hungry. The {hero} made a fire and put the kettle on. They told each other stories until the snow had \
     melted and the first flowers came out.",
    "In the middle of the {place} a {hero} was late for work. The bus was gone, and the streets were full. A {friend} offered a ride on a red \
     bicycle. They went through the park, over the bridge and past the old tower. The {hero} was there just in time, and on the next day \
     they went by bicycle again.",
    "On a warm day a {hero} lay in the {place} and looked at the clouds. A {friend} sat down nearby and asked what there was to see. They saw a \
     ship, a castle and a very big cake. Then it began to rain, and the cake came down on them in small drops. They ran home, wet and \
     happy, and had real cake with tea.",
];

pub(crate) const LONG_STORY: &[&str] = &[
    "Once upon a time there was a {hero} who lived in the {place} and had never been anywhere else. One morning a letter lay in front of the \
     door. It said that far in the north there was a lamp which never went out, and that whoever found it could make one wish.",
    "The {hero} packed some bread, a blanket and an old map, and set out at once. On the first day the road was easy and the sun was warm. On \
     the second day it began to rain, and the {hero} slept under a bridge. On the third day the {hero} met a {friend} that had hurt its foot. \
     So the {hero} carried the {friend} on its back, and the way became slower, but it was no longer lonely.",
    "After seven days they reached a river without a bridge. The {friend} knew a song that calls the fish, and the fish carried them across on \
     their backs. After ten days they came to a gate of iron. The {hero} knocked three times, and nobody answered. Then the {friend} crept \
     through the keyhole and opened the gate from the inside.",
    "Behind the gate there was a small room, and in the room there was the lamp. It was not big, and it was not made of gold, but its light was \
     warm and steady. The {hero} thought for a long time. Then it wished that everyone on the road that night would find the way home.",
    "And so it was. The light shone over the hills and over the {place}, and all who were lost saw it and came home. The {hero} and the {friend} \
     walked back together, and the whole way was bright. That is the end of the story.",
];

/// Topics after "tell me about" (or a whole request after `=`) and what is said about them.
pub(crate) const EXPLAIN: &[(Phrases, &str)] = &[
    (
        &["the moon", "the moon and the earth"],
        "The moon is the only natural satellite of the earth. It takes about one month to go around us, and it always shows us the same side. \
         It makes the tides of the sea. People walked on it for the first time in nineteen sixty nine.",
    ),
    (
        &["the sun", "our star"],
        "The sun is a star in the middle of our solar system. It is so large that about one million earths would fit into it. Its light needs a \
         little more than eight minutes to reach us. Without the sun there would be no weather and no life on the earth.",
    ),
    (
        &["bees", "honey bees"],
        "Bees live together in large families. They collect nectar from flowers and turn it into honey. On their way they carry pollen from \
         flower to flower, and so they help many plants to bear fruit. A bee tells the others with a dance where good flowers are.",
    ),
    (
        &["rainbows", "the rainbow", "=how does a rainbow work", "=why is there a rainbow"],
        "A rainbow needs sun and rain at the same time. The light of the sun enters the drops, is reflected inside and comes out again. Each \
         colour is bent by a slightly different angle, so we see them side by side. The sun is always behind you when you see a rainbow.",
    ),
    (
        &["coffee", "=how do i make coffee", "=how do you make coffee"],
        "For good coffee take fresh water and freshly ground beans. Use about sixty grams of coffee for one litre of water. The water should \
         be hot, but no longer boiling. Let it brew for four minutes, and drink it while it is warm.",
    ),
    (
        &["pancakes", "=how do i make pancakes", "=give me a recipe for pancakes"],
        "For pancakes mix two cups of flour, two eggs, two cups of milk and a little salt. Let the batter rest for ten minutes. Heat some \
         butter in a pan and bake the pancakes from both sides until they are golden. Shall I set a timer for ten minutes?",
    ),
    (
        &["the sea", "the ocean"],
        "The sea covers more than two thirds of the earth. Its water is salty, because rivers have carried salt into it for a very long time. \
         The deepest place is about eleven kilometres below the surface. Most of the sea has never been seen by anyone.",
    ),
    (
        &["memory", "your memory", "=how do you work", "=how do you share the memory", "=explain how you work"],
        "I share one memory with the part that listens and the part that speaks. When they need more, I give some of mine back and think a \
         little slower. When they are done, I take it again and become faster. My words stay the same all the time.",
    ),
    (
        &["trains", "railways"],
        "Trains run on rails, so they need little energy for a heavy load. The first ones were moved by steam. Today most of them run on \
         electricity. The fastest trains in service go faster than three hundred kilometres in one hour.",
    ),
    (
        &["cats", "the cat"],
        "Cats sleep for more than half of the day. They see very well when it is almost dark, and they hear much better than we do. A cat \
         lands on its feet most of the time, because it turns its body in the air. When a cat likes you, it closes its eyes slowly.",
    ),
];
