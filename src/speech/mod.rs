//! Wyoming frames, audio formats, and the road from speech to speech.
