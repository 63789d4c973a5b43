//! ASR, TTS and others as child processes.
