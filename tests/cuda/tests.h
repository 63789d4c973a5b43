// One pair of functions per test file: all tests, and the tests that must detect a planted fault.
#pragma once
void test_products();
void test_layers();
void test_attention();
void probe_products();
void probe_layers();
void probe_attention();
