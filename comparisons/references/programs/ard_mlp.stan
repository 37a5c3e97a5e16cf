data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  vector[N] y;
  int<lower=1> width;
  real<lower=0> relevance;
  real<lower=0> noise_scale;
}
parameters {
  real<lower=0> noise;
  vector<lower=0>[F] input_scale;
  matrix[F, width] base;
  row_vector[width] hidden_bias;
  vector[width] output_weight;
  real output_bias;
}
model {
  matrix[F, width] weight = diag_pre_multiply(input_scale, base) / sqrt(F);
  noise ~ normal(0, noise_scale);
  input_scale ~ cauchy(0, relevance);
  to_vector(base) ~ normal(0, 1);
  hidden_bias ~ normal(0, 1);
  output_weight ~ normal(0, 1 / sqrt(width));
  output_bias ~ normal(0, 1);
  y ~ normal(tanh(x * weight + rep_matrix(hidden_bias, N)) * output_weight + output_bias, noise);
}
