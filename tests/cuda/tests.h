#pragma once
void test_products();
void probe_products();
