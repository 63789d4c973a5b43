//! The whole program as a user runs it: a child process on a folder of its own, real models, workers and memory.

mod bad_input;
mod behind;
mod clients;
mod deploy;
mod faults;
mod fleet;
mod frozen;
mod gpu;
mod hold;
mod installation;
mod life;
mod memory;
mod models;
mod neighbour;
mod planned;
mod pressure;
mod printed;
mod promises;
mod python;
mod rough;
mod servers;
mod survival;
mod talk;
mod workers;
mod wyoming;
mod wyoming_client;
