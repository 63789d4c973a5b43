// One pair of functions for each file of tests: all of them, and those that a planted fault has to be seen by.
#pragma once
void test_products();
void test_layers();
void test_attention();
void probe_products();
void probe_layers();
void probe_attention();
