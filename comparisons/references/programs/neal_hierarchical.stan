data {
  int<lower=1> N;
  int<lower=1> F;
  matrix[N, F] x;
  int<lower=2> classes;
  array[N] int<lower=1, upper=classes> y;  // labels from 1
  int<lower=1> width;
  real<lower=0> degrees;
  real<lower=0> scale;
}
parameters {
  real<lower=0> hidden_weight_precision;
  matrix[F, width] hidden_weight_base;
  real<lower=0> hidden_bias_precision;
  row_vector[width] hidden_bias_base;
  real<lower=0> output_weight_precision;
  matrix[width, classes] output_weight_base;
  row_vector[classes] output_bias;
}
model {
  matrix[F, width] hidden_weight = hidden_weight_base / sqrt(F * hidden_weight_precision);
  row_vector[width] hidden_bias = hidden_bias_base / sqrt(hidden_bias_precision);
  matrix[width, classes] output_weight = output_weight_base / sqrt(width * output_weight_precision);
  matrix[N, classes] f = tanh(x * hidden_weight + rep_matrix(hidden_bias, N)) * output_weight
                         + rep_matrix(output_bias, N);
  hidden_weight_precision ~ gamma(degrees / 2, degrees * square(scale) / 2);
  hidden_bias_precision ~ gamma(degrees / 2, degrees * square(scale) / 2);
  output_weight_precision ~ gamma(degrees / 2, degrees * square(scale) / 2);
  to_vector(hidden_weight_base) ~ normal(0, 1);
  hidden_bias_base ~ normal(0, 1);
  to_vector(output_weight_base) ~ normal(0, 1);
  output_bias ~ normal(0, 1);
  for (n in 1 : N) {
    y[n] ~ categorical_logit(f[n]');
  }
}
