data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> width;
  real<lower=0> sigma;
  real<lower=0> noise_scale;
}
parameters {
  real<lower=0> noise;
  real<lower=0> hidden_weight_global;
  vector<lower=0>[width] hidden_weight_local;
  real<lower=0> hidden_weight_slab;  // a variance
  matrix[F, width] base;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  vector[width] wanted = hidden_weight_global * hidden_weight_local;
  vector[width] scale = wanted .* sqrt(hidden_weight_slab / (hidden_weight_slab + square(wanted)));
  matrix[F, width] weight = diag_post_multiply(base, scale);
  noise ~ normal(0, noise_scale);
  hidden_weight_global ~ cauchy(0, sigma / sqrt(F));
  hidden_weight_local ~ cauchy(0, 1);
  hidden_weight_slab ~ inv_gamma(2, 2.0 / F);
  to_vector(base) ~ normal(0, 1);
  hidden_bias ~ normal(0, 1);
  output_weight ~ normal(0, 1 / sqrt(width));
  output_bias ~ normal(0, 1);
  y ~ normal(tanh(x * weight + rep_matrix(hidden_bias, N)) * output_weight + output_bias, noise);
}
